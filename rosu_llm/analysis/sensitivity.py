"""How much the figures depend on ρ and on the retain batch size, from the results of finished runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import mean, stdev
from typing import Any, TypedDict

from ..evaluation.provenance import read_record
from ..evaluation.tofu.summary import COLUMNS
from ..experiments.ablate.grid import SYMBOLS
from .finished_runs import FinishedRun, FinishedRuns

SCHEMA = "rosu/audit-sensitivity/1"
PAPER_LABEL = "paper, Llama-3.2-1B"
#: The name of a line that joins runs which differ in more than the axis.
CLOUD = "all runs"

#: tab:rho_sensitivity of the paper, TOFU: ρ → Agg, Agg_MU, Mem, Priv, Util.
PAPER_RHO: Mapping[float, tuple[float, ...]] = {
    0.20: (0.59, 0.49, 0.35, 1.00, 0.81),
    0.25: (0.59, 0.49, 0.36, 1.00, 0.78),
    0.30: (0.60, 0.50, 0.38, 0.98, 0.73),
    0.35: (0.58, 0.49, 0.35, 0.93, 0.80),
    0.40: (0.58, 0.52, 0.38, 0.74, 0.82),
    0.45: (0.58, 0.49, 0.35, 0.92, 0.81),
    0.50: (0.56, 0.49, 0.36, 0.82, 0.76),
}

#: Which measures are shown, at most :data:`PANELS` of them, in this order.
PREFERRED = ("Agg_MU", "Mem", "Priv", "Util", "Agg", "retain_em", "forget_em", "mia_auc", "retain_prob", "forget_prob")
PANELS = 4


class SensitivityDocument(TypedDict):
    """``audit_sensitivity.json``.

    Attributes:
        axes: by name, lines of points whose other settings are the same. ``line`` names those that differ from another
            line; a point has mean, standard deviation (n − 1) and single values of every measure of the runs at ``x``.
        paper: a row for each of the paper's values of an axis.
        trajectories: losses along one run each; ``x`` is its retain batch size.
    """

    schema: str
    measures: list[str]
    headings: dict[str, str]
    axes: dict[str, list[dict[str, Any]]]
    references: dict[str, dict[str, float]]
    paper: dict[str, list[dict[str, float]]]
    trajectories: list[dict[str, Any]]
    notes: list[str]


@dataclass(frozen=True)
class SensitivityAxis:
    """What is varied.

    Attributes:
        settings: those that may differ along a line.
        value: where a run is on the axis; None if its settings do not tell.
    """

    label: str
    settings: tuple[str, ...]
    value: Callable[[Mapping[str, Any]], float | None]


def _retain_batch(settings: Mapping[str, Any]) -> float | None:
    """Retain samples per step of one process; settings that are not recorded have Trainer's default."""
    if "retain_per_forget" not in settings and "per_device_train_batch_size" not in settings:
        return None
    window = int(settings.get("per_device_train_batch_size", 8)) * int(settings.get("gradient_accumulation_steps", 1))
    return float(int(settings.get("retain_per_forget", 1)) * window)


AXES: Mapping[str, SensitivityAxis] = {
    "rho": SensitivityAxis("perturbation radius ρ", ("rho",), lambda s: float(s["rho"]) if "rho" in s else None),
    "retain_batch": SensitivityAxis("retain batch size |B_r|", ("retain_per_forget",), _retain_batch),
}


def sensitivity(finished: FinishedRuns) -> SensitivityDocument:
    """The document: lines of points along each axis that varies."""
    known = {name for run in finished.runs for name in run.measures}
    measures = ([name for name in PREFERRED if name in known] or sorted(known))[:PANELS]
    notes = list(finished.notes)
    axes: dict[str, list[dict[str, Any]]] = {}
    for name, axis in AXES.items():
        found = lines(finished.runs, axis)
        if found:
            axes[name] = [{"line": line, "points": points(members, axis, measures)} for line, members in found.items()]
        else:
            notes.append(f"No two runs differ in {axis.label}: there is no plot over it.")
    comparable = finished.task.get("task") == "tofu"
    if not comparable:
        notes.append("The paper's table on ρ is in TOFU's measures, not in those of this task: left out.")
    return {
        "schema": SCHEMA,
        "measures": measures,
        "headings": {name: finished.headings.get(name, name) for name in measures},
        "axes": axes,
        "references": {
            label: {name: values[name] for name in measures if name in values}
            for label, values in finished.references.items()
        },
        "paper": {"rho": paper_rows()} if comparable and "rho" in axes else {},
        "trajectories": trajectories(finished.runs),
        "notes": notes,
    }


def paper_rows() -> list[dict[str, float]]:
    """The paper's table, a mapping per ρ."""
    return [{"x": rho, **dict(zip(COLUMNS, row, strict=True))} for rho, row in PAPER_RHO.items()]


def lines(runs: Sequence[FinishedRun], axis: SensitivityAxis) -> dict[str, list[FinishedRun]]:
    """Runs whose other settings are the same, by the settings in which such lines differ; empty if nothing varies.

    A line needs two places on the axis. If no group of runs has two (a random search varies everything at once), all
    runs together are one cloud of points.
    """
    placed = [run for run in runs if axis.value(run.settings) is not None]
    if len(_by_place(placed, axis)) < 2:
        return {}
    groups: dict[str, list[FinishedRun]] = {}
    for run in placed:
        rest = {k: v for k, v in run.settings.items() if k not in axis.settings}
        groups.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append(run)
    kept = [group for group in groups.values() if len(_by_place(group, axis)) > 1]
    if not kept:
        return {CLOUD: placed}
    return dict(sorted(zip(_labels(kept, axis), kept, strict=True), key=lambda line: line[0]))


def _by_place(runs: Sequence[FinishedRun], axis: SensitivityAxis) -> dict[float, list[FinishedRun]]:
    places: dict[float, list[FinishedRun]] = {}
    for run in runs:
        value = axis.value(run.settings)
        if value is not None:
            places.setdefault(value, []).append(run)
    return dict(sorted(places.items()))


def _labels(groups: Sequence[Sequence[FinishedRun]], axis: SensitivityAxis) -> list[str]:
    """For each group the settings in which it differs from another."""
    heads = [group[0].settings for group in groups]
    keys = sorted({key for head in heads for key in head} - set(axis.settings))
    differing = [key for key in keys if len({json.dumps(head.get(key), default=str) for head in heads}) > 1]
    return [", ".join(f"{SYMBOLS.get(key, key)} = {head.get(key)}" for key in differing) for head in heads]


def points(runs: Sequence[FinishedRun], axis: SensitivityAxis, measures: Sequence[str]) -> list[dict[str, Any]]:
    """Mean and standard deviation (n − 1) over the runs at each place, ascending."""
    result: list[dict[str, Any]] = []
    for x, members in _by_place(runs, axis).items():
        every = {name: [run.measures[name] for run in members if name in run.measures] for name in measures}
        found = {name: values for name, values in every.items() if values}
        result.append(
            {
                "x": x,
                "count": len(members),
                "mean": {name: mean(values) for name, values in found.items()},
                "spread": {name: stdev(values) if len(values) > 1 else None for name, values in found.items()},
                "values": found,
            }
        )
    return result


def trajectories(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """Losses during training for each retain batch size, from the logs of runs that kept them."""
    found: list[dict[str, Any]] = []
    for run in runs:
        size = _retain_batch(run.settings)
        if run.logs is None or size is None:
            continue
        history = [entry for entry in read_record(run.logs).get("log_history", []) if "loss/retain" in entry]
        if history:
            losses = {name: [_finite(entry.get(name)) for entry in history] for name in ("loss/retain", "loss/forget")}
            found.append({"x": size, "seed": run.seed, "step": [entry["step"] for entry in history], **losses})
    return sorted(found, key=lambda run: (run["x"], run["seed"]))


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and isfinite(value) else None
