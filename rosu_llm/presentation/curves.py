"""Logged quantities over steps: a panel for each quantity, a line for each run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .blocks import Figure, shown, text_table
from .drawing import legend, short, style, thin


class Quantity(NamedTuple):
    """Something logged at every step.

    Attributes:
        magnitude: only its size matters, over many orders: drawn as |x| on a logarithmic axis.
    """

    key: str
    title: str
    axis: str
    magnitude: bool = False


FORGET_LOSS = Quantity("loss/forget", "Forget loss", "L_f")
RETAIN_LOSS = Quantity("loss/retain", "Retain loss", "L_r")
COSINE = Quantity("coupling/cosine", "Coupling of forget and retain gradients", "cos θ")


class Curve(NamedTuple):
    """One quantity of one run.

    Attributes:
        steps, values: at most ``drawing.MOST`` points; NaN where no value was finite.
        place: number of the run, which gives the line's colour and dashes.
        merged: how many logged values one point is the mean of.
        lost: how many logged values were not finite.
    """

    steps: tuple[float, ...]
    values: tuple[float, ...]
    label: str = ""
    place: int = 0
    merged: int = 1
    lost: int = 0

    @property
    def finite(self) -> list[float]:
        """The values that can be drawn."""
        return [value for value in self.values if math.isfinite(value)]


def read_curve(log: Sequence[Mapping[str, Any]], key: str, label: str = "", place: int = 0) -> Curve | None:
    """The quantity as logged, thinned by means over equally many neighbours; None if no entry has it."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    logged = [(e["step"], e[key]) for e in log if is_number(e.get(key)) and is_number(e.get("step"))]
    if not logged:
        return None
    steps, values, merged = thin(logged)
    return Curve(steps, values, label, place, merged, sum(not math.isfinite(value) for _, value in logged))


def curves_figure(file: str, title: str, panels: Mapping[Quantity, Sequence[Curve]]) -> Figure:
    """The figure of these quantities, one above the other; its data are steps × curves."""
    everything = [(quantity, curve) for quantity, curves in panels.items() for curve in curves]
    labels = list(dict.fromkeys(curve.label for _, curve in everything))

    def draw(figure: Any) -> None:
        drawn = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (quantity, curves) in zip(drawn, panels.items(), strict=True):
            for c in curves:
                shape = {"marker": "o", "markersize": 4} if len(c.values) < 3 else {}
                values = [abs(v) or math.nan for v in c.values] if quantity.magnitude else c.values
                axes.plot(c.steps, values, label=short(c.label), **style(c.place), **shape)
            finite = [value for c in curves for value in c.finite]
            size = [abs(value) for value in finite if value]
            if size and (quantity.magnitude or (min(finite) > 0 and max(size) > 100 * min(size))):
                axes.set_yscale("log")
            axes.set_ylabel(quantity.axis)
        drawn[-1].set_xlabel("step")
        legend(figure, *drawn, columns=1 if max(len(short(label)) for label in labels) > 22 else 2)

    columns = {
        (c.label if len(panels) == 1 else f"{c.label}: {quantity.key}"): dict(zip(c.steps, c.values, strict=True))
        for quantity, c in everything
    }
    steps = sorted({step for column in columns.values() for step in column})
    rows = [(shown(step), *(shown(column.get(step)) for column in columns.values())) for step in steps]
    keys = ", ".join(quantity.key for quantity in panels)
    merged = max(curve.merged for _, curve in everything)
    note = f"Every point is the mean of up to {merged} log entries." if merged > 1 else ""
    ends = "; ".join(f"{c.label} from {shown(c.values[0])} to {shown(c.values[-1])}" for _, c in everything)
    data = text_table(f"{title}: {keys}", ("step", *columns), rows)
    caption = f"{keys} of {', '.join(labels)}. {note}".strip()
    size = (5.0, 0.6 + 2.4 * len(panels) + 0.16 * (len(labels) if len(labels) > 1 else 0))
    return Figure(file, title, f"{keys} over steps: {ends}.", draw, data, caption, size)
