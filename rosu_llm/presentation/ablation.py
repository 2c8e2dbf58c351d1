"""A grid of variants: rows are variants, columns are measures, mean ± standard deviation over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..experiments.ablate.cells import Selector, summarise
from ..experiments.ablate.grid import SYMBOLS, Grid, Variant
from ..experiments.attempt import FAILED, Record, Task
from .blocks import MISSING, Figure, Footnotes, Row, Section, Table, TableCell
from .charts import Panel, Series, along

NAMES = {
    "rho": "perturbation radius ρ",
    "protect_rank": "protected retain directions k",
    "retain_per_forget": "retain samples per forget sample",
}


def grid_section(grid: Grid, task: Task, select: Selector, seeds: Sequence[int]) -> Section:
    """The grid's table, and a figure along each axis of numbers."""
    table = grid_table(grid, task, select, seeds)
    figures = [axis_figure(grid, key, task, select, table) for key in numeric_axes(grid)]
    return Section(grid.name, grid.title, [table, *figures])


def grid_table(grid: Grid, task: Task, select: Selector, seeds: Sequence[int]) -> Table:
    """The grid's table, reference rows first. A failed row says so and why."""
    footnotes = Footnotes()
    references = [Variant(label, {}, ("",) * len(grid.columns)) for label in task.references.values()]
    rows = [_row(variant, select("", variant.label), task, footnotes, reference=True) for variant in references]
    rows += [_row(variant, select(grid.name, variant.label), task, footnotes) for variant in grid.variants]
    over = f"Mean ± standard deviation (n − 1) over seeds {', '.join(map(str, seeds))}."
    notes = (over if len(seeds) > 1 else f"Seed {seeds[0]}.", *grid.notes, *task.notes)
    columns = (*grid.columns, *task.columns.values())
    return Table(columns, tuple(rows), notes, tuple(footnotes), caption=grid.title, digits=task.digits)


def _row(
    variant: Variant, records: Mapping[int, Record], task: Task, footnotes: Footnotes, *, reference: bool = False
) -> Row:
    failed = {seed: record for seed, record in records.items() if record.status == FAILED}
    reasons: dict[str, list[int]] = {}
    for seed, record in failed.items():
        reasons.setdefault(record.error or "unknown error", []).append(seed)
    why = " ".join(f"seed {', '.join(map(str, seeds))} failed: {error}" for error, seeds in reasons.items())
    if len(failed) == len(records) and len(reasons) == 1:
        why = f"failed: {next(iter(reasons))}"
    footnote = footnotes.mark(why)
    cells = [TableCell(text=mark or None) for mark in variant.marks]
    for metric in task.columns:
        found = summarise(records, metric)
        if found is None:
            cells.append(TableCell(footnote=footnote, text="failed" if footnote else MISSING))
        else:
            cells.append(TableCell(found.mean, footnote, found.spread))
        footnote = None  # once per row is enough
    per_seed = {
        str(seed): {"status": r.status, "error": r.error, "seconds": r.seconds, **r.metrics}
        for seed, r in records.items()
    }
    return Row(variant.label, tuple(cells), reference, {"settings": dict(variant.settings), "per_seed": per_seed})


def numeric_axes(grid: Grid) -> list[str]:
    """The axes of a grid along which there is something to draw: two or more different numbers."""

    def numeric(values: set[Any]) -> bool:
        return len(values) > 1 and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)

    return [key for key in grid.axes if numeric({variant.settings[key] for variant in grid.variants})]


def lines(grid: Grid, key: str) -> dict[str, list[Variant]]:
    """The variants in order of ``key``, one line for each combination of the other axes."""
    found: dict[str, list[Variant]] = {}
    for variant in grid.variants:
        rest = [f"{SYMBOLS.get(k, k)} = {variant.settings[k]}" for k in grid.axes if k != key]
        found.setdefault(", ".join(rest), []).append(variant)
    return {name: sorted(line, key=lambda v: float(v.settings[key])) for name, line in found.items()}


def axis_figure(grid: Grid, key: str, task: Task, select: Selector, table: Table) -> Figure:
    """The grid along ``key``; failed cells leave a gap, reference rows are level lines."""
    panels = []
    for metric in task.plotted:
        series = []
        for name, variants in lines(grid, key).items():
            found = {float(v.settings[key]): summarise(select(grid.name, v.label), metric) for v in variants}
            points = [(x, point.mean, point.spread) for x, point in found.items() if point is not None]
            series.append(Series(name or str(task.base.get("method", "rosu")), points))
        levels = {label: summarise(select("", label), metric) for label in task.references.values()}
        known = {label: level.mean for label, level in levels.items() if level is not None}
        panels.append(Panel(task.columns[metric], series, known))
    file = f"{grid.name}_{key}" if grid.name == "axes" else grid.name
    return along(file, grid.title, NAMES.get(key, key), panels, table)
