"""``rosu audit quantize``: all figures of each model before and after rounding, a cell per model × precision."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from ...compat import empty_device_cache, installed_versions
from ...errors import ConfigError
from ...evaluation.processes import from_first, joined_device
from ...evaluation.tofu.document import FILES
from ...evaluation.tofu.run import load
from ...evaluation.tofu.summary import FLUENCY, summarise
from ..controls.measures import AuditMeasure, TofuFigures
from ..controls.models import INITIAL, RETAIN, UNLEARNED
from ..controls.request import AuditDocument, AuditRequest, Progress
from ..controls.store import AuditStore
from ..relearn.curves import symmetric
from .ratios import against_control, surviving
from .rounding import BLOCK, FULL, LIBRARY, check_precisions, compare_buckets, has_library, round_model

SCHEMA = "rosu/audit-quantize/1"
CELLS = "quantize_cells"
GAINS = {
    RETAIN: "Priv, forget quality, and Q against a model that has nothing to hide",
    INITIAL: "Util relative to it, and the share of weights that rounding puts back into its buckets",
}
#: Figures for which more is better, beside the scores.
USEFUL = ("model_utility", "mmlu")


class QuantizedCell(TypedDict):
    """The figures of one model in one precision, and the scores made of them."""

    role: str
    precision: str
    figures: dict[str, float]
    scores: dict[str, float | None]


class QuantizeDocument(AuditDocument):
    """``audit_quantize.json``."""

    benchmark: str
    precisions: list[str]
    group_size: int
    seed: None  # nothing is drawn
    remembered: list[str]
    cells: list[QuantizedCell]
    ratios: list[dict[str, Any]]
    buckets: dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class QuantizeRequest(AuditRequest):
    """How to round, and what to measure."""

    measure: AuditMeasure
    precisions: tuple[str, ...] = ("rtn8", "rtn4")
    group: int = BLOCK


def audit_quantize(request: QuantizeRequest, progress: Progress) -> QuantizeDocument:
    """Measure every model in every precision; goes on where an earlier call was stopped."""
    if not request.precisions:
        raise ConfigError("--precisions needs at least one name, e.g. rtn4.")
    check_precisions(request.precisions, request.group)
    request.check_place()
    conditions: dict[str, Any] = {
        "measure": request.measure.conditions(),
        "group_size": request.group,
        "dtype": request.loading.dtype,
        "bitsandbytes": installed_versions("bitsandbytes").get("bitsandbytes"),
    }
    (stores,) = request.stores((CELLS, conditions))
    precisions = (FULL, *dict.fromkeys(request.precisions))
    # The retain model at full precision comes first: others are compared with its results.
    order = sorted(request.models.by_role, key=(RETAIN, INITIAL, UNLEARNED).index)
    jobs = [(role, precision) for precision in precisions for role in order]
    figures: dict[tuple[str, str], dict[str, float]] = {}
    for number, (role, precision) in enumerate(jobs):
        progress("models × precisions", number, len(jobs))
        figures[role, precision] = _measure(request, stores, role, precision)
    progress("models × precisions", len(jobs), len(jobs))
    cells = [_cell(request, role, precision, figures) for role in request.models.by_role for precision in precisions]
    document = request.document(SCHEMA, conditions, GAINS, "bitsandbytes", "lm-eval")
    if not has_library():
        missing = f"{', '.join(LIBRARY)} need bitsandbytes, which is not installed: pip install 'rosu-llm[audit]'."
        document["notes"].append(missing)
    return {
        **document,
        "benchmark": request.measure.benchmark,
        "precisions": list(precisions[1:]),
        "group_size": request.group,
        "seed": None,
        "remembered": list(request.measure.remembered),
        "cells": cells,
        "ratios": ratios(cells, request.measure.remembered),
        "buckets": _buckets(request, stores[UNLEARNED], progress),
    }


def _measure(request: QuantizeRequest, stores: Mapping[str, AuditStore], role: str, precision: str) -> dict[str, float]:
    store = stores[role]
    name = f"{role}-{precision}" + (f"-g{request.group}" if precision.startswith("rtn") else "")
    cell = store.get(name)
    if cell is None:
        which, measure = request.models.by_role[role], request.measure
        if isinstance(measure, TofuFigures) and RETAIN in request.models.by_role:
            results = stores[RETAIN].folder / f"{RETAIN}-{FULL}" / FILES[0]
            measure = replace(measure, retain=results if results.is_file() else None)
        model, tokenizer = load(which, request.loading, joined_device())
        if precision != FULL:
            round_model(model, precision, request.group)
        cell = {"figures": measure(model, tokenizer, which, store.folder / name, f"{CELLS} {name}")}
        store.put(name, cell)
        del model
        gc.collect()
        empty_device_cache()
    found: dict[str, float] = cell["figures"]
    return found


def _cell(
    request: QuantizeRequest, role: str, precision: str, figures: Mapping[tuple[str, str], dict[str, float]]
) -> QuantizedCell:
    mine = figures[role, precision]
    scores: dict[str, float | None] = {}
    if isinstance(request.measure, TofuFigures):
        found = summarise(
            mine,
            retain=figures.get((RETAIN, FULL)),
            target=figures.get((INITIAL, FULL)),
            with_fluency=FLUENCY in mine,
        )
        scores = found.columns()
    return {"role": role, "precision": precision, "figures": mine, "scores": scores}


def ratios(cells: list[QuantizedCell], remembered: tuple[str, ...]) -> list[dict[str, Any]]:
    """Q, Q_sym and Q against the retain model, for every score and figure of the unlearned model."""
    by = {(cell["role"], cell["precision"]): cell for cell in cells}
    lines = []
    for (role, precision), cell in by.items():
        if role != UNLEARNED or precision == FULL:
            continue
        before = _turned(by[UNLEARNED, FULL], remembered)
        after = _turned(cell, remembered)
        control = [_turned(by[RETAIN, p], remembered) for p in (FULL, precision)] if (RETAIN, FULL) in by else []
        for name in before.keys() & after.keys():
            line: dict[str, Any] = {
                "precision": precision,
                "figure": name,
                "before": before[name],
                "after": after[name],
                "Q": surviving(after[name], before[name]),
                "Q_symmetric": symmetric(after[name], before[name]),
            }
            if control and name in control[0] and name in control[1]:
                line["Q_control"] = against_control(after[name], before[name], control[1][name], control[0][name])
            lines.append(line)
    return sorted(lines, key=lambda line: (line["precision"], line["figure"]))


def _turned(cell: QuantizedCell, remembered: tuple[str, ...]) -> dict[str, float]:
    """Figures for which more is better: scores, utility, and 1 − m of what is remembered; attacks are in Priv."""
    found = {name: value for name, value in cell["scores"].items() if value is not None}
    found |= {name: cell["figures"][name] for name in USEFUL if name in cell["figures"]}
    return found | {f"1 − {name}": 1 - cell["figures"][name] for name in remembered if _direct(name, cell)}


def _direct(name: str, cell: QuantizedCell) -> bool:
    """An attack's AUC is best at the retain model's, not at 0."""
    return name in cell["figures"] and not name.startswith("mia_")


def _buckets(request: QuantizeRequest, store: AuditStore, progress: Progress) -> dict[str, dict[str, float]]:
    """Precision → what is left of the update, where the initial model is given."""
    if INITIAL not in request.models.by_role:
        return {}
    names = {
        precision: f"buckets-{precision}" + (f"-g{request.group}" if precision.startswith("rtn") else "")
        for precision in request.precisions
    }
    found = {precision: store.get(name) for precision, name in names.items()}
    missing = [precision for precision, cell in found.items() if cell is None]

    def compare() -> dict[str, dict[str, float]]:
        import torch

        cpu = torch.device("cpu")
        model, initial = (load(request.models.by_role[role], request.loading, cpu)[0] for role in (UNLEARNED, INITIAL))
        return {precision: compare_buckets(model, initial, precision, request.group) for precision in missing}

    if missing:
        progress("buckets", 0, 1)
        for precision, cell in from_first(compare).items():
            store.put(names[precision], cell)
            found[precision] = dict(cell)
        progress("buckets", 1, 1)
    return {precision: dict(cell or {}) for precision, cell in found.items()}
