"""Grids as tables: rows are variants, columns are measures, mean ± standard deviation over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..experiments.ablate.cells import Selector
from ..experiments.ablate.grid import Grid
from ..experiments.ablate.summary import summarise
from ..experiments.store import FAILED, Record
from ..experiments.task import Task
from .tables import MISSING, Cell, Row, Table, number


def grid_table(grid: Grid, task: Task, select: Selector, seeds: Sequence[int]) -> Table:
    """The grid's table, reference rows first. A failed row says so and why."""
    footnotes: list[str] = []
    rows = [
        _row(label, select("", label), ("",) * len(grid.columns), task, footnotes, reference=True)
        for label in task.references.values()
    ]
    for variant in grid.variants:
        records = select(grid.name, variant.label)
        rows.append(_row(variant.label, records, variant.marks, task, footnotes, settings=variant.settings))
    return Table(
        (*grid.columns, *task.columns.values()),
        tuple(rows),
        notes=(_over(seeds), *grid.notes, *task.notes),
        footnotes=tuple(footnotes),
    )


def _over(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"Seed {seeds[0]}."
    return f"Mean ± standard deviation (n − 1) over seeds {', '.join(map(str, seeds))}."


def _row(
    label: str,
    records: Mapping[int, Record],
    marks: Sequence[str],
    task: Task,
    footnotes: list[str],
    *,
    reference: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Row:
    footnote = None
    failed = {seed: record for seed, record in records.items() if record.status == FAILED}
    if failed:
        text = _failure(failed, len(records))
        if text not in footnotes:
            footnotes.append(text)
        footnote = footnotes.index(text) + 1
    cells = [Cell(None, text=mark or None) for mark in marks]
    for metric in task.columns:
        found = summarise(records, metric)
        if found is None:
            cells.append(Cell(None, footnote, text="failed" if footnote else MISSING))
        else:
            cells.append(Cell(found.mean, footnote, found.spread))
        footnote = None  # once per row is enough
    details = {
        "settings": dict(settings or {}),
        "per_seed": {
            str(seed): {"status": r.status, "error": r.error, "seconds": r.seconds, **r.metrics}
            for seed, r in records.items()
        },
    }
    return Row(label, tuple(cells), reference=reference, details=details)


def _failure(failed: Mapping[int, Record], total: int) -> str:
    reasons: dict[str, list[int]] = {}
    for seed, record in failed.items():
        reasons.setdefault(record.error or "unknown error", []).append(seed)
    if len(failed) == total and len(reasons) == 1:
        return f"failed: {next(iter(reasons))}"
    return " ".join(f"seed {', '.join(map(str, seeds))} failed: {error}" for error, seeds in reasons.items())


def rich_table(table: Table, title: str, digits: int) -> Any:
    """The same table for a terminal."""
    from rich.table import Table as RichTable

    result = RichTable(title=title, padding=(0, 0, 0, 1))
    result.add_column("", no_wrap=True)
    for column in table.columns:
        result.add_column(column, justify="right")
    for at, row in enumerate(table.rows):
        shown = [_plain(cell, digits) for cell in row.cells]
        last = row.reference and (at + 1 == len(table.rows) or not table.rows[at + 1].reference)
        result.add_row(row.label, *shown, end_section=last, style="dim" if row.reference else None)
    return result


def _plain(cell: Cell, digits: int) -> str:
    text = (cell.text or MISSING) if cell.value is None else number(cell.value, digits)
    text += "" if cell.spread is None else f" ±{number(cell.spread, digits)}"
    return text if cell.footnote is None else f"{text} \\[{cell.footnote}]"
