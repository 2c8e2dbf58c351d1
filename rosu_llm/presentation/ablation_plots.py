"""One picture per numeric axis: the task's main measures along it, mean with a band of one standard deviation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..experiments.ablate.cells import Selector
from ..experiments.ablate.grid import SYMBOLS, Grid, Variant
from ..experiments.ablate.summary import Summary, summarise
from ..experiments.task import Task
from .plots import pyplot, save_figure

#: An axis that spans at least this factor is drawn logarithmically: 1, 2, 4, 8 are then equally far apart.
LOG_FROM = 8.0

NAMES = {
    "rho": "perturbation radius ρ",
    "protect_rank": "protected retain directions k",
    "retain_per_forget": "retain samples per forget sample",
}
_REFERENCE_STYLES = ({"color": "0.35", "linestyle": "--"}, {"color": "goldenrod", "linestyle": ":"})


def numeric_axes(grid: Grid) -> list[str]:
    """The axes of a grid along which there is something to draw: two or more different numbers."""
    found = []
    for key in grid.axes:
        values = {variant.settings[key] for variant in grid.variants}
        if len(values) > 1 and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
            found.append(key)
    return found


def is_log(values: Sequence[float]) -> bool:
    """Whether a logarithmic axis shows these values better."""
    return min(values) > 0 and max(values) / min(values) >= LOG_FROM


def widened(low: float, high: float) -> tuple[float, float]:
    """Limits at least a tenth of the values' size apart, so that 0.998 beside 1.000 does not look like a collapse.

    Nearly all of the room is added below: most measures are shares, and above one there is nothing.
    """
    lacking = max(0.0, 0.1 * max(abs(low), abs(high)) - (high - low))
    return low - 0.95 * lacking, high + 0.05 * lacking


def lines(grid: Grid, key: str) -> dict[str, list[Variant]]:
    """The variants in order of ``key``, one line for each combination of the other axes."""
    found: dict[str, list[Variant]] = {}
    for variant in grid.variants:
        rest = [f"{SYMBOLS.get(k, k)} = {variant.settings[k]}" for k in grid.axes if k != key]
        found.setdefault(", ".join(rest), []).append(variant)
    return {name: sorted(line, key=lambda v: float(v.settings[key])) for name, line in found.items()}


def axis_plot(grid: Grid, key: str, task: Task, select: Selector, path: Path) -> None:
    """Draw the grid along ``key``; failed cells leave a gap, reference rows are level lines."""
    plt = pyplot()
    count = len(task.plotted)
    drawn = lines(grid, key)
    figure, row = plt.subplots(1, count, figsize=(2.9 * count + 1.9, 2.9), layout="constrained", squeeze=False)
    for axes, metric in zip(row[0], task.plotted, strict=True):
        for i, (name, variants) in enumerate(drawn.items()):
            points = {
                float(v.settings[key]): found
                for v in variants
                if (found := summarise(select(grid.name, v.label), metric)) is not None
            }
            _line(axes, points, f"C{i}", name or str(task.base.get("method", "rosu")))
        for style, label in zip(_REFERENCE_STYLES, task.references.values(), strict=False):
            level = summarise(select("", label), metric)
            if level is not None:
                axes.axhline(level.mean, linewidth=1.3, zorder=1, label=label, **style)
        _scale(axes, [float(v.settings[key]) for v in grid.variants])
        axes.set_ylim(*widened(*axes.get_ylim()))
        axes.set_title(task.columns[metric], fontsize=10)
        axes.set_xlabel(NAMES.get(key, key))
        axes.grid(alpha=0.25)
    handles, labels = row[0][0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside right center", frameon=False)
    save_figure(figure, path)


def _line(axes: Any, points: Mapping[float, Summary], color: str, label: str) -> None:
    x, mean = list(points), [point.mean for point in points.values()]
    spread = [point.spread or 0.0 for point in points.values()]
    axes.plot(x, mean, color=color, marker="o", markersize=4, linewidth=1.4, label=label, zorder=3)
    if any(spread):
        low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0, zorder=2)


def _scale(axes: Any, values: Sequence[float]) -> None:
    ticks = sorted(set(values))
    if is_log(ticks):
        axes.set_xscale("log", base=2)
    if len(ticks) <= 8:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
