"""The trainer's log as curves, all runs in one picture per quantity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from .blocks import Block, Figure, Grid, Missing, Section, Text, shown
from .figures import short, style
from .run import Run

MOST = 300  # points of one curve


@dataclass(frozen=True)
class Quantity:
    """Something logged at every step.

    Attributes:
        magnitude: only its size matters, over many orders: drawn as |x| on a logarithmic axis.
    """

    key: str
    title: str
    axis: str
    magnitude: bool = False


QUANTITIES = (
    Quantity("loss/forget", "Forget loss", "L_f"),
    Quantity("loss/retain", "Retain loss", "L_r"),
    Quantity("loss", "Outer objective", "loss"),
    Quantity("coupling/cosine", "Coupling of forget and retain gradients", "cos θ"),
    Quantity("coupling/leak", "Leak: first-order change of the retain loss by δ", "|⟨r, δ⟩|", magnitude=True),
    Quantity("step/amplification_ratio", "Amplification: length of the pull over the optimizer's step", "ratio"),
    Quantity("learning_rate", "Learning rate", "η"),
)


@dataclass(frozen=True)
class Curve:
    """One quantity of one run.

    Attributes:
        steps, values: at most ``MOST`` points; NaN where no value was finite.
        merged: how many logged values one point is the mean of.
        lost: how many logged values were not finite.
    """

    steps: tuple[float, ...]
    values: tuple[float, ...]
    merged: int = 1
    lost: int = 0


def curve(run: Run, key: str) -> Curve | None:
    """The quantity as logged, thinned to ``MOST`` points by means over equally many neighbours; None if absent."""
    logged = [(e["step"], e[key]) for e in run.log if _number(e.get(key)) and _number(e.get("step"))]
    if not logged:
        return None
    steps, values, merged = thin(logged)
    return Curve(steps, values, merged, sum(not math.isfinite(value) for _, value in logged))


def thin(
    logged: Sequence[tuple[float, float]], combine: Callable[[Sequence[float]], float] = fmean
) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    """At most ``MOST`` points, each combining equally many finite neighbours; NaN, a gap in the line, where none is."""
    merged = math.ceil(len(logged) / MOST)
    groups = [logged[at : at + merged] for at in range(0, len(logged), merged or 1)]
    finite = [[value for _, value in group if math.isfinite(value)] for group in groups]
    values = tuple(combine(group) if group else math.nan for group in finite)
    return tuple(group[-1][0] for group in groups), values, merged


def curves(runs: Sequence[Run]) -> Section:
    """One figure per quantity that anybody logged."""
    trained = [run for run in runs if run.kind != "rosu sweep"]
    blocks: list[Block] = [Missing(f"{run.label} has no log, so no curves.") for run in trained if not run.log]
    absent = []
    for quantity in QUANTITIES:
        found = {at: c for at, run in enumerate(runs) if (c := curve(run, quantity.key)) is not None}
        drawn = {at: c for at, c in found.items() if any(map(math.isfinite, c.values))}
        lost = [f"{runs[at].label} ({c.lost})" for at, c in found.items() if c.lost]
        if lost:
            blocks.append(Missing(f"{quantity.key} was NaN or infinite in log entries of {', '.join(lost)}: gaps."))
        if drawn:
            blocks.append(_figure(quantity, runs, drawn))
        elif not found:
            absent.append(quantity.key)
    if absent and any(run.log for run in runs):
        blocks.append(Missing(f"Logged by no run: {', '.join(absent)} (methods without a perturbation have no leak)."))
    if not blocks:
        blocks.append(Missing("No run has a log."))
    else:
        blocks.insert(0, Text("Losses are those of each step's own window, so they are noisy."))
    return Section("curves", "Curves", blocks)


def _figure(quantity: Quantity, runs: Sequence[Run], found: dict[int, Curve]) -> Figure:
    values = [value for c in found.values() for value in c.values if math.isfinite(value)]
    size = [abs(value) for value in values if value]
    spread = bool(size) and min(values) > 0 and max(size) > 100 * min(size)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for at, c in found.items():
            shape = {"marker": "o", "markersize": 4} if len(c.values) < 3 else {}
            shown_values = [abs(v) or math.nan for v in c.values] if quantity.magnitude else c.values
            axes.plot(c.steps, shown_values, label=short(runs[at].label), **style(at), **shape)
        if size and (quantity.magnitude or spread):
            axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel(quantity.axis)
        if len(runs) > 1:
            figure.legend(loc="outside lower center", ncols=1 if max(map(_width, runs)) > 22 else 2)

    merged = max(c.merged for c in found.values())
    note = f"Every point is the mean of up to {merged} log entries." if merged > 1 else ""
    who = ", ".join(runs[at].label for at in found)
    ends = "; ".join(f"{runs[at].label} from {shown(c.values[0])} to {shown(c.values[-1])}" for at, c in found.items())
    return Figure(
        f"curve_{quantity.key.replace('/', '_')}",
        quantity.title,
        f"{quantity.key} over steps: {ends}.",
        draw,
        _data(quantity, runs, found),
        f"{quantity.key} of {who}. {note}".strip(),
        (5.0, 3.0 + 0.16 * (len(runs) if len(runs) > 1 else 0)),
    )


def _width(run: Run) -> int:
    return len(short(run.label))


def _data(quantity: Quantity, runs: Sequence[Run], found: dict[int, Curve]) -> Grid:
    """Steps × runs; a dash where a run logged nothing at that step."""
    columns = {at: dict(zip(c.steps, c.values, strict=True)) for at, c in found.items()}
    steps = sorted({step for column in columns.values() for step in column})
    rows = tuple((shown(step), *(shown(column.get(step)) for column in columns.values())) for step in steps)
    return Grid(f"{quantity.title}: {quantity.key}", ("step", *(runs[at].label for at in found)), rows)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
