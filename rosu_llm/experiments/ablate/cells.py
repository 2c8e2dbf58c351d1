"""Cells in order, each read from the store or run, and their mean over seeds; one that fails ends no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ..attempt import DONE, FAILED, KEPT, AttemptObserver, CellStore, Figures, Record, Started, Task, attempt, cell_key
from ..config_task import complete
from .grid import Grid

#: (row, seed) → key. A row is (grid, label); reference rows have the grid "".
Rows = dict[tuple[str, str], dict[int, str]]


@dataclass(frozen=True)
class Cell:
    """One run: a reference row's, or a variant's with its settings."""

    key: str
    label: str
    seed: int
    task: Mapping[str, Any]
    settings: Mapping[str, Any]
    values: Mapping[str, Any]
    reference: str | None = None


def plan(
    task: Task,
    grids: Sequence[Grid],
    seeds: Sequence[int],
    canonical: Callable[[Mapping[str, Any]], dict[str, Any]] = complete,
) -> tuple[list[Cell], Rows]:
    """The different cells of all grids, seed by seed, and which of them each row consists of.

    Rows with the same settings (ROSU itself is one of most grids) share their cells; ``canonical`` says when settings
    are the same.
    """
    cells: dict[str, Cell] = {}
    rows: Rows = {}
    base = task.reference_settings(canonical(task.base))
    identity = task.identity(canonical(task.base))
    for seed in task.reference_seeds(seeds):
        for name, label in task.references.items():
            settings = {"reference": name, **base}
            cell = Cell(cell_key(identity, settings, seed), label, seed, identity, settings, {}, reference=name)
            cells[cell.key] = cell
            rows.setdefault(("", label), {})[seed] = cell.key
    for seed in seeds:
        for grid in grids:
            for variant in grid.variants:
                values = {**task.base, **variant.settings}
                settings = canonical(values)
                identity = task.identity(settings)
                key = cell_key(identity, settings, seed)
                label = f"{grid.name}: {variant.label}"
                cells.setdefault(key, Cell(key, label, seed, identity, settings, values))
                rows.setdefault((grid.name, variant.label), {})[seed] = key
    order = {seed: at for at, seed in enumerate(seeds)}
    return sorted(cells.values(), key=lambda cell: order.get(cell.seed, -1)), rows


def run_cells(
    cells: Sequence[Cell],
    task: Task,
    out: Path,
    observer: AttemptObserver,
    *,
    retry_failed: bool = False,
    keep_models: bool = False,
) -> dict[str, Record]:
    """The record of every cell, by key."""
    store = CellStore(out / "cells")
    records = {}
    for cell in cells:
        label, record = f"{cell.label}, seed {cell.seed}", store.get(cell.key)
        if record is None or _outdated(record, cell, out, retry_failed, keep_models):
            observer.started(label)
            record = _run(cell, task, out, observer, keep_models)
            store.put(record)
            status = record.status
        else:
            status = FAILED if record.error else KEPT
        ending = "" if status == KEPT else f"{record.seconds:.1f} s"
        observer.finished(label, status, f"{ending}  {record.error}" if record.error else ending)
        records[cell.key] = record
    return records


def _outdated(record: Record, cell: Cell, out: Path, retry_failed: bool, keep_models: bool) -> bool:
    if record.status == FAILED:
        return retry_failed
    # A model that is asked for but was not kept, or is gone, can only be had by running the cell again.
    return keep_models and cell.reference is None and not (record.model and (out / record.model).is_dir())


def _run(cell: Cell, task: Task, out: Path, observer: AttemptObserver, keep_models: bool) -> Record:
    folder = out / "models" / f"{cell.key}-seed{cell.seed}"
    keep = keep_models and cell.reference is None

    def start() -> Started:
        if cell.reference is not None:
            return task.refer(cell.reference, cell.seed, observer.steps)
        return task.start(cell.values, cell.seed, folder, observer.steps)

    def save(started: Started, figures: Figures, seconds: float) -> bool:
        if keep:
            started.trainer.save_model()
            started.trainer.save_state()
            started.trainer.create_model_card()
        return keep

    result = attempt(start, folder, observer.steps, save)
    return Record(
        **vars(result),
        key=cell.key,
        label=cell.label,
        seed=cell.seed,
        model=str(folder.relative_to(out)) if keep and not result.error else None,
        task=dict(cell.task),
        settings=dict(cell.settings),
    )


Selector = Callable[[str, str], dict[int, Record]]


def selector(rows: Rows, records: Mapping[str, Record]) -> Selector:
    """Records of a row by grid and label, seed → record."""
    return lambda grid, label: {seed: records[key] for seed, key in rows[grid, label].items()}


@dataclass(frozen=True)
class Summary:
    """Mean, and standard deviation with n − 1 where there are two or more values."""

    mean: float
    spread: float | None
    count: int


def summarise(records: Mapping[int, Record], metric: str) -> Summary | None:
    """One measure over the seeds that finished; None where no seed has it."""
    found = (r.metrics.get(metric) for r in records.values() if r.status == DONE)
    values = [value for value in found if value is not None]
    if not values:
        return None
    return Summary(mean(values), stdev(values) if len(values) > 1 else None, len(values))
