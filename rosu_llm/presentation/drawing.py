"""Figures drawn with matplotlib (extra ``plots``): PNG for files, SVG for light and for dark pages, in one style."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any, NamedTuple

from ..errors import RosuError
from .blocks import Figure

INK, FAINT = "#24292f", "#d0d7de"
# Okabe and Ito's colours, which colour-blind readers tell apart, too; on dark ground lighter neighbours of them.
_LIGHT = ("#0072b2", "#d55e00", "#008060", "#aa4499", "#b8860b", "#3a8fc4", "#555555")
_DARK = ("#56b4e9", "#ff9e57", "#3fc9a0", "#e58fc7", "#f0e442", "#9ad0f5", "#bbbbbb")
_DARKENED = {INK: "#e6edf3", FAINT: "#444c56", **dict(zip(_LIGHT, _DARK, strict=True))}
_COLOUR = re.compile("|".join(_DARKENED))
_LINES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (2, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
#: Points of one curve.
MOST = 300


class PlotsUnavailableError(RosuError, ImportError):
    """matplotlib is not installed."""


class Picture(NamedTuple):
    """A figure on transparent ground for both colour schemes, and on white."""

    light: str
    dark: str
    png: bytes


@contextmanager
def drawn(figure: Figure) -> Iterator[Any]:
    """The figure as one of matplotlib's, which draws to files only, for the time of the block."""
    try:
        import matplotlib
    except ImportError as error:
        raise PlotsUnavailableError("Plots need matplotlib: pip install 'rosu-llm[plots]'.") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings: dict[str, Any] = {
        "axes.prop_cycle": plt.cycler(color=_LIGHT),
        "grid.alpha": 0.5,
        "font.size": 9,
        "legend.fontsize": 8,
        "svg.hashsalt": figure.key,
        **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
        **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), FAINT),
    }
    with plt.rc_context(settings):
        made = plt.figure(figsize=figure.size, layout="constrained")
        try:
            figure.draw(made)
            yield made
        finally:
            plt.close(made)


def png(figure: Figure) -> bytes:
    """The figure for a file of its own."""
    with drawn(figure) as made:
        return _png(made)


def draw(figure: Figure) -> Picture:
    """The figure in all three forms. The dark one is the light one with other colours, as drawing takes the time."""
    svg = io.StringIO()
    with drawn(figure) as made:
        image = _png(made)
        made.set_layout_engine("none")  # the layout found for the first form holds for the second
        made.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    light = svg.getvalue()
    return Picture(light, _COLOUR.sub(lambda found: _DARKENED[found[0]], light), image)


def _png(made: Any) -> bytes:
    image = io.BytesIO()
    made.savefig(image, format="png", dpi=150)
    return image.getvalue()


def style(at: int) -> dict[str, Any]:
    """How the line of this number is drawn in every figure: colour and dashes both identify it."""
    return {"color": f"C{at % len(_LIGHT)}", "linestyle": _LINES[at % len(_LINES)], "linewidth": 1.6}


def dot(at: int) -> dict[str, Any]:
    """The same for points."""
    return {"color": f"C{at % len(_LIGHT)}", "marker": _MARKERS[at % len(_MARKERS)]}


def short(label: str, limit: int = 34) -> str:
    """A label that fits a legend, without what matplotlib reads as mathematics (``$``) or as hidden (leading ``_``)."""
    cut = label if len(label) <= limit else f"{label[: limit // 2 - 1]}…{label[-limit // 2 + 1 :]}"
    return re.sub("^_", " ", cut).replace("$", r"\$")


def legend(figure: Any, *panels: Any, columns: int = 2) -> None:
    """One legend below all panels, each label once."""
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= {label: handle for handle, label in zip(handles, labels, strict=True) if label not in found}
    if len(found) > 1:
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns)


def is_log(values: Sequence[float]) -> bool:
    """Whether a logarithmic axis shows these values better: 1, 2, 4, 8 are then equally far apart."""
    return min(values) > 0 and max(values) / min(values) >= 8.0


def widened(low: float, high: float) -> tuple[float, float]:
    """Limits at least a tenth of the values' size apart, so that 0.998 beside 1.000 does not look like a collapse.

    Nearly all of the room is added below: most measures are shares, and above one there is nothing.
    """
    lacking = max(0.0, 0.1 * max(abs(low), abs(high)) - (high - low))
    return low - 0.95 * lacking, high + 0.05 * lacking


def thin(
    logged: Sequence[tuple[float, float]], combine: Callable[[Sequence[float]], float] = fmean
) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    """At most ``MOST`` points, each combining equally many finite neighbours; NaN, a gap in the line, where none is."""
    merged = math.ceil(len(logged) / MOST)
    groups = [logged[at : at + merged] for at in range(0, len(logged), merged or 1)]
    finite = [[value for _, value in group if math.isfinite(value)] for group in groups]
    values = tuple(combine(group) if group else math.nan for group in finite)
    return tuple(group[-1][0] for group in groups), values, merged
