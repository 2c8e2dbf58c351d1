"""Cells in order, each either read from the store or run; one that fails is recorded and the others go on."""

from __future__ import annotations

import gc
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...errors import NonFiniteError, RosuError, one_line
from ..settings import complete
from ..store import DONE, FAILED, Record, Store, cell_key
from ..task import Steps, Task
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


class Watcher(Protocol):
    """Is told what happens."""

    def started(self, cell: Cell) -> None: ...

    def steps(self, done: int, total: int) -> None: ...

    def finished(self, cell: Cell, record: Record, *, reused: bool) -> None: ...


def plan(task: Task, grids: Sequence[Grid], seeds: Sequence[int]) -> tuple[list[Cell], Rows]:
    """The different cells of all grids, seed by seed, and which of them each row consists of.

    Rows with the same settings (ROSU itself is one of most grids) share their cells.
    """
    cells: dict[str, Cell] = {}
    rows: Rows = {}
    base = task.reference_settings(complete(task.base))
    identity = task.identity(complete(task.base))
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
                settings = complete(values)
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
    watcher: Watcher,
    *,
    retry_failed: bool = False,
    keep_models: bool = False,
) -> dict[str, Record]:
    """The record of every cell, by key."""
    store = Store(out / "cells")
    records = {}
    for cell in cells:
        found = store.get(cell.key)
        if found is not None and _still_good(found, cell, out, retry_failed, keep_models):
            watcher.finished(cell, found, reused=True)
        else:
            watcher.started(cell)
            found = _run(cell, task, out, watcher.steps, keep_models)
            store.put(found)
            watcher.finished(cell, found, reused=False)
        records[cell.key] = found
    return records


def _still_good(record: Record, cell: Cell, out: Path, retry_failed: bool, keep_models: bool) -> bool:
    if record.status == FAILED:
        return not retry_failed
    # A model that is asked for but was not kept, or is gone, can only be had by running the cell again.
    return not keep_models or cell.reference is not None or bool(record.model and (out / record.model).is_dir())


def _run(cell: Cell, task: Task, out: Path, steps: Steps, keep_models: bool) -> Record:
    started = time.perf_counter()
    folder = out / "models" / f"{cell.key}-seed{cell.seed}"
    keep = keep_models and cell.reference is None
    metrics: dict[str, float] = {}
    error = None
    if cell.reference is None:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    try:
        metrics = _measured(cell, task, folder, keep, steps)
    except Exception as raised:  # whatever goes wrong in a cell must not take the others with it
        name = "" if isinstance(raised, RosuError) else f"{type(raised).__name__}: "
        error = (name + one_line(raised))[:500]
    if cell.reference is None and (error or not keep):
        shutil.rmtree(folder, ignore_errors=True)
    _free()
    return Record(
        key=cell.key,
        label=cell.label,
        seed=cell.seed,
        status=FAILED if error else DONE,
        metrics=metrics,
        seconds=round(time.perf_counter() - started, 2),
        error=error,
        model=str(folder.relative_to(out)) if keep and not error else None,
        task=dict(cell.task),
        settings=dict(cell.settings),
    )


def _measured(cell: Cell, task: Task, folder: Path, keep: bool, steps: Steps) -> dict[str, float]:
    if cell.reference is not None:
        metrics = task.refer(cell.reference, cell.seed, steps)
    else:
        metrics = task.run(cell.values, cell.seed, folder, keep=keep, steps=steps)
    broken = [name for name, value in metrics.items() if not math.isfinite(value)]
    if broken:
        raise NonFiniteError(f"The model is broken: {', '.join(broken)} is not finite after training.")
    return metrics


def _free() -> None:
    """Give back what the trainer held: its hooks and callbacks are cycles that only the collector sees."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


Selector = Callable[[str, str], dict[int, Record]]


def selector(rows: Rows, records: Mapping[str, Record]) -> Selector:
    """Records of a row by grid and label, seed → record."""
    return lambda grid, label: {seed: records[key] for seed, key in rows[grid, label].items()}
