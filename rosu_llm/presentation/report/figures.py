"""Figures drawn once with matplotlib: as SVG for light and for dark pages, and as PNG for markdown."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

from ..plots import pyplot
from .blocks import Figure

INK, FAINT = "#24292f", "#d0d7de"
# Okabe and Ito's colours, which colour-blind readers tell apart, too; on dark ground lighter neighbours of them.
_LIGHT = ("#0072b2", "#d55e00", "#008060", "#aa4499", "#b8860b", "#3a8fc4", "#555555")
_DARK = ("#56b4e9", "#ff9e57", "#3fc9a0", "#e58fc7", "#f0e442", "#9ad0f5", "#bbbbbb")
_DARKENED = {INK: "#e6edf3", FAINT: "#444c56", **dict(zip(_LIGHT, _DARK, strict=True))}
_COLOUR = re.compile("|".join(_DARKENED))
_LINES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (2, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Picture:
    """A figure on transparent ground for both colour schemes, and on white."""

    light: str
    dark: str
    png: bytes


def draw(figure: Figure) -> Picture:
    """The figure in all three forms. The dark one is the light one with other colours: drawing is what takes time."""
    plt = pyplot()
    settings: dict[str, Any] = {
        "axes.prop_cycle": plt.cycler(color=_LIGHT),
        "axes.edgecolor": FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": FAINT,
        "grid.alpha": 0.5,
        "font.size": 9,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "svg.hashsalt": figure.key,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
        **dict.fromkeys(("xtick.color", "ytick.color"), FAINT),
    }
    png, svg = io.BytesIO(), io.StringIO()
    with plt.rc_context(settings):
        drawn = plt.figure(figsize=figure.size, layout="constrained")
        try:
            figure.draw(drawn)
            drawn.savefig(png, format="png", dpi=130)
            drawn.set_layout_engine("none")  # the places found for the first form hold for the second
            drawn.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
        finally:
            plt.close(drawn)
    light = svg.getvalue()
    return Picture(light, _COLOUR.sub(lambda found: _DARKENED[found[0]], light), png.getvalue())


def style(at: int) -> dict[str, Any]:
    """How the run of this number is drawn in every figure: by colour and by line, so that either tells it."""
    return {"color": f"C{at % len(_LIGHT)}", "linestyle": _LINES[at % len(_LINES)], "linewidth": 1.6}


def dot(at: int) -> dict[str, Any]:
    """The same for points."""
    return {"color": f"C{at % len(_LIGHT)}", "marker": _MARKERS[at % len(_MARKERS)]}


def short(label: str, limit: int = 34) -> str:
    """A label that fits a legend; ``$`` is no mathematics here, and a leading ``_`` would hide it."""
    cut = label if len(label) <= limit else f"{label[: limit // 2 - 1]}…{label[-limit // 2 + 1 :]}"
    return re.sub("^_", " ", cut).replace("$", r"\$")
