"""Finished runs of ``rosu ablate`` (``cells/*.json``) and ``rosu sweep`` (``trials.json``) in one form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..evaluation.provenance import read_record
from ..experiments.attempt import ANSWER_COLUMNS, DONE, CellStore

SWEEP, CELLS = "trials.json", "cells"


@dataclass(frozen=True)
class FinishedRun:
    """One run.

    Attributes:
        settings: of ``rosu train``, as far as recorded.
        measures: figures by name.
        seed: of the run; runs that differ in it alone are averaged.
        logs: its ``trainer_state.json``, if kept.
    """

    settings: Mapping[str, Any]
    measures: Mapping[str, float]
    seed: int
    logs: Path | None = None


@dataclass
class FinishedRuns:
    """All runs of one task.

    Attributes:
        task: what they have in common; figures of different tasks cannot be compared.
        headings: name of a measure → its title in tables and plots.
        references: measures of models to compare with (before unlearning, retrained), by label.
    """

    task: dict[str, Any]
    runs: list[FinishedRun] = field(default_factory=list)
    headings: dict[str, str] = field(default_factory=dict)
    references: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_results(paths: Sequence[Path]) -> FinishedRuns:
    """The runs below all ``paths``, which must belong to one task."""
    if not paths:
        raise DataError("No results were given: name the folder of a rosu sweep or rosu ablate.")
    found = [_read(path) for path in paths]
    first = found[0]
    for path, other in zip(paths[1:], found[1:], strict=True):
        if other.task != first.task:
            differing = sorted(k for k in {*first.task, *other.task} if first.task.get(k) != other.task.get(k))
            raise DataError(
                f"{paths[0]} and {path} are results of different tasks ({', '.join(differing)} differ), whose figures "
                "cannot be compared: plot them one at a time."
            )
        first.runs += other.runs
        first.notes += other.notes
        first.references |= other.references
    if not first.runs:
        raise DataError(f"No finished run in {', '.join(map(str, paths))}: there is nothing to plot yet.")
    return first


def _read(path: Path) -> FinishedRuns:
    sweep = path / SWEEP if path.is_dir() else path
    if sweep.name == SWEEP and sweep.is_file():
        return _read_sweep(sweep)
    cells = path if path.name == CELLS else path / CELLS
    if cells.is_dir():
        return _read_cells(cells)
    raise DataError(
        f"{path} holds no results: give the folder of a rosu ablate (with {CELLS}/) or of a rosu sweep (with {SWEEP})."
    )


def _read_sweep(path: Path) -> FinishedRuns:
    content = read_record(path)
    recipe = content.get("recipe", {})
    task = {"task": content.get("task"), "measured": "scores"}
    task |= {name: recipe.get(name) for name in ("model_name_or_path", "forget_data", "retain_data")}
    results = FinishedRuns(task, headings=dict(content.get("headings", {})))
    for name, reference in content.get("references", {}).items():
        results.references[name] = _numbers(reference.get("scores", {}))
    unfinished = 0
    for trial in content.get("trials", []):
        measures = _numbers(trial.get("scores", {}))
        if trial.get("state") != "done" or not measures:
            unfinished += 1
            continue
        settings = {**recipe, **trial["settings"]}
        logs = _logs(path.parent, trial.get("model"))
        results.runs.append(FinishedRun(settings, measures, int(content.get("seed", 0)), logs))
    if unfinished:
        results.notes.append(f"{path.parent.name}: {unfinished} trials without scores (failed, pruned, …) left out.")
    return results


def _read_cells(folder: Path) -> FinishedRuns:
    store = CellStore(folder)
    records = [record for file in sorted(folder.glob("*.json")) if (record := store.get(file.stem)) is not None]
    tasks = {json.dumps(record.task, sort_keys=True): record.task for record in records}
    if len(tasks) > 1:
        raise DataError(
            f"{folder} holds cells of {len(tasks)} different tasks (other data, model or size), whose figures cannot "
            "be compared: keep each in a folder of its own."
        )
    results = FinishedRuns(next(iter(tasks.values()), {}), headings=dict(ANSWER_COLUMNS))
    failed = 0
    for record in records:
        if record.status != DONE:
            failed += 1
        elif "reference" in record.settings:
            results.references.setdefault(record.label, dict(record.metrics))
        else:
            logs = _logs(folder.parent, record.model)
            results.runs.append(FinishedRun(record.settings, _numbers(record.metrics), record.seed, logs))
    if failed:
        results.notes.append(f"{folder.parent.name}: {failed} failed cells left out.")
    return results


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(v) for name, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _logs(folder: Path, model: str | None) -> Path | None:
    path = folder / model / "trainer_state.json" if model else None
    return path if path is not None and path.is_file() else None
