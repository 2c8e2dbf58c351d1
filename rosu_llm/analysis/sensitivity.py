"""How much the figures depend on ρ and on the retain batch size, from results that are there already."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import mean, stdev
from typing import Any

from ..evaluation.provenance import read_record
from ..evaluation.tofu.summary import COLUMNS
from ..experiments.ablate.grid import SYMBOLS
from .sensitivity_results import Outcome, Results

SCHEMA = "rosu/audit-sensitivity/1"
PAPER_LABEL = "paper, Llama-3.2-1B"

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


@dataclass(frozen=True)
class Axis:
    """What is varied.

    Attributes:
        settings: those that may differ along a line.
        value: where a run is on the axis; None where that is not recorded.
    """

    label: str
    settings: tuple[str, ...]
    value: Callable[[Mapping[str, Any]], float | None]


def _rho(settings: Mapping[str, Any]) -> float | None:
    return float(settings["rho"]) if "rho" in settings else None


def _retain_batch(settings: Mapping[str, Any]) -> float | None:
    """Retain samples per step of one process; what is not recorded has Trainer's default."""
    if "retain_per_forget" not in settings and "per_device_train_batch_size" not in settings:
        return None
    window = int(settings.get("per_device_train_batch_size", 8)) * int(settings.get("gradient_accumulation_steps", 1))
    return float(int(settings.get("retain_per_forget", 1)) * window)


AXES: Mapping[str, Axis] = {
    "rho": Axis("perturbation radius ρ", ("rho",), _rho),
    "retain_batch": Axis("retain batch size |B_r|", ("retain_per_forget",), _retain_batch),
}


def sensitivity(results: Results) -> dict[str, Any]:
    """The document: lines of points along each axis that varies."""
    known = {name for outcome in results.outcomes for name in outcome.measures}
    chosen = [name for name in PREFERRED if name in known] or sorted(known)
    measures = chosen[:PANELS]
    notes = list(results.notes)
    axes = {}
    for name, axis in AXES.items():
        found = lines(results.outcomes, axis)
        if found:
            axes[name] = [{"line": line, "points": points(members, axis, measures)} for line, members in found.items()]
        else:
            notes.append(f"No two runs differ in {axis.label}: there is no plot over it.")
    comparable = results.task.get("task") == "tofu"
    if not comparable:
        notes.append("The paper's table on ρ is in TOFU's measures, not in those of this task: left out.")
    return {
        "schema": SCHEMA,
        "measures": measures,
        "headings": {name: results.headings.get(name, name) for name in measures},
        "axes": axes,
        "references": {
            label: {name: values[name] for name in measures if name in values}
            for label, values in results.references.items()
        },
        "paper": {"rho": paper_rows()} if comparable and "rho" in axes else {},
        "trajectories": trajectories(results.outcomes),
        "notes": notes,
    }


def paper_rows() -> list[dict[str, float]]:
    """The paper's table, a mapping per ρ."""
    return [{"x": rho, **dict(zip(COLUMNS, row, strict=True))} for rho, row in PAPER_RHO.items()]


def lines(outcomes: Sequence[Outcome], axis: Axis) -> dict[str, list[Outcome]]:
    """Runs whose other settings are the same, by what tells those lines apart; empty where nothing varies.

    A line needs two places on the axis. Where none has (a random search varies everything at once), all runs are one
    cloud of points.
    """
    placed = [outcome for outcome in outcomes if axis.value(outcome.settings) is not None]
    if len({axis.value(outcome.settings) for outcome in placed}) < 2:
        return {}
    groups: dict[str, list[Outcome]] = {}
    for outcome in placed:
        rest = {k: v for k, v in outcome.settings.items() if k not in axis.settings}
        groups.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append(outcome)
    kept = [group for group in groups.values() if len({axis.value(outcome.settings) for outcome in group}) > 1]
    if not kept:
        return {CLOUD: placed}
    return dict(sorted(zip(_labels(kept, axis), kept, strict=True), key=lambda line: line[0]))


#: The name of a line that is none.
CLOUD = "all runs"


def _labels(groups: Sequence[Sequence[Outcome]], axis: Axis) -> list[str]:
    """For each group the settings in which it differs from another."""
    heads = [group[0].settings for group in groups]
    keys = sorted({key for head in heads for key in head} - set(axis.settings))
    told = [key for key in keys if len({json.dumps(head.get(key), default=str) for head in heads}) > 1]
    return [", ".join(f"{SYMBOLS.get(key, key)} = {head.get(key)}" for key in told) for head in heads]


def points(outcomes: Sequence[Outcome], axis: Axis, measures: Sequence[str]) -> list[dict[str, Any]]:
    """Mean and standard deviation (n − 1) over the runs at each place, ascending."""
    places: dict[float, list[Outcome]] = {}
    for outcome in outcomes:
        value = axis.value(outcome.settings)
        assert value is not None
        places.setdefault(value, []).append(outcome)
    result = []
    for x, members in sorted(places.items()):
        found = {name: [o.measures[name] for o in members if name in o.measures] for name in measures}
        result.append(
            {
                "x": x,
                "count": len(members),
                "mean": {name: mean(values) for name, values in found.items() if values},
                "spread": {name: stdev(v) if len(v) > 1 else None for name, v in found.items() if v},
                "values": {name: values for name, values in found.items() if values},
            }
        )
    return result


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and isfinite(value) else None


def trajectories(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Losses along the run for each retain batch size, from the logs of runs that kept them."""
    found = []
    for outcome in outcomes:
        size = AXES["retain_batch"].value(outcome.settings)
        if outcome.logs is None or size is None:
            continue
        history = [entry for entry in read_record(outcome.logs).get("log_history", []) if "loss/retain" in entry]
        if history:
            losses = {key: [_finite(entry.get(key)) for entry in history] for key in ("loss/retain", "loss/forget")}
            found.append({"x": size, "seed": outcome.seed, "step": [entry["step"] for entry in history], **losses})
    return sorted(found, key=lambda run: (run["x"], run["seed"]))
