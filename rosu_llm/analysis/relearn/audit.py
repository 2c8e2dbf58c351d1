"""``rosu audit relearn``: every model × share × seed is attacked once, every evaluated step is a cell on disk."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any, TypedDict

from ...compat import empty_device_cache
from ...data.sources import load_samples, read_pairs, source_content
from ...data.tofu import split_names
from ...errors import ConfigError
from ...evaluation.model_identity import Model
from ...evaluation.processes import from_first, joined_device, started_processes
from ...evaluation.tofu.run import load, load_tokenizer
from ..controls.measures import AuditMeasure
from ..controls.models import INITIAL, RETAIN, UNLEARNED
from ..controls.request import AuditDocument, AuditRequest, Progress
from ..controls.store import AuditStore
from .attack import FORGET, RETAINED, RelearnAttack, check_shares, draw, relearn
from .curves import area_between, evaluated_steps, gain, robustness, steps_to_half, symmetric

SCHEMA = "rosu/audit-relearn/1"
CELLS = "relearn_cells"
GAINS = {
    RETAIN: "R and the area between the curves (a model that never saw the data also learns it when shown it)",
    INITIAL: "the gap that can be regained and the steps until half of it is back",
}


class RelearnCell(TypedDict):
    """The figures of one model after so many steps of one attack."""

    role: str
    share: float
    seed: int
    step: int
    figures: dict[str, float]


class RelearnDocument(AuditDocument):
    """``audit_relearn.json``."""

    benchmark: str
    attack: dict[str, Any]
    remembered: list[str]
    shares: list[float]
    seeds: list[int]
    rows: dict[str, int]  # share → rows shown
    cells: list[RelearnCell]
    summary: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RelearnRequest(AuditRequest):
    """What to attack with, and how often."""

    measure: AuditMeasure
    attack: RelearnAttack
    data: str | None = None  # hub id or folder of TOFU, where the forget set comes from
    forget_split: str = "forget10"
    source: str | None = None  # the forget set where it is not TOFU's
    shares: tuple[float, ...] = (1.0,)
    seeds: tuple[int, ...] = (0,)
    limit: int | None = None
    max_length: int = 512

    def rows_from(self) -> str:
        """The source of the rows that are shown."""
        if self.attack.on not in (FORGET, RETAINED):
            return self.attack.on
        if self.source is not None and self.attack.on == FORGET:
            return self.source
        if self.data is None:
            raise ConfigError(
                f"--on {self.attack.on} is a split of TOFU; for another benchmark give the rows: --on FILE."
            )
        splits = split_names(self.forget_split)
        return f"{self.data}:{splits.forget if self.attack.on == FORGET else splits.retain}"


def audit_relearn(request: RelearnRequest, progress: Progress) -> RelearnDocument:
    """Attack every model with every share and seed; goes on where an earlier call was stopped."""
    check_shares(request.shares)
    if not request.seeds:
        raise ConfigError("--seeds needs at least one number.")
    request.attack.per_process(started_processes())
    request.check_place()
    shares = request.shares if request.attack.on == FORGET else (1.0,)
    source = request.rows_from()
    available = len(read_pairs(source, limit=request.limit))
    for share in shares:
        draw(available, share, 0)  # raises for an empty one before anything is loaded
    conditions: dict[str, Any] = {
        "measure": request.measure.conditions(),
        "attack": asdict(request.attack),
        "rows": source_content(source),
        "limit": request.limit,
        "max_length": request.max_length,
        "dtype": request.loading.dtype,
    }
    conditions["attack"].pop("micro_batch")
    (stores,) = request.stores((CELLS, conditions))
    cells: list[RelearnCell] = []
    rows: dict[str, int] = {}
    jobs = [(role, share, seed) for seed in request.seeds for share in shares for role in request.models.by_role]
    for number, (role, share, seed) in enumerate(jobs):
        progress("attacks", number, len(jobs))
        found = _attack(request, stores[role], role, share, seed, source, progress)
        rows[f"{share:g}"] = found[0]
        cells += found[1]
    progress("attacks", len(jobs), len(jobs))
    return {
        **request.document(SCHEMA, conditions, GAINS, "peft", "lm-eval"),
        "benchmark": request.measure.benchmark,
        "attack": asdict(request.attack),
        "remembered": list(request.measure.remembered),
        "shares": list(shares),
        "seeds": list(request.seeds),
        "rows": rows,
        "cells": cells,
        "summary": summary(cells, request.measure.remembered),
    }


def _attack(
    request: RelearnRequest, store: AuditStore, role: str, share: float, seed: int, source: str, progress: Progress
) -> tuple[int, list[RelearnCell]]:
    which = request.models.by_role[role]
    tokenizer = load_tokenizer(which, request.loading)
    samples = _samples(request, tokenizer, which, source)
    chosen = draw(len(samples), share, seed)
    shown = [samples[i] for i in chosen]
    steps = evaluated_steps(request.attack.total(len(shown)))
    names = {step: f"{role}-share{share:g}-seed{seed}-step{step}" for step in steps}
    found = {step: cell for step in steps if (cell := store.get(names[step])) is not None}
    done = len(found)
    progress("evaluated states", done, len(steps))

    def observe(step: int, state: Any) -> None:
        nonlocal done
        name = names[step]
        place = request.out / CELLS / name  # not among shared cells, where another audit may measure the same
        figures = request.measure(state, tokenizer, which, place, f"{CELLS} {name}")
        store.put(name, cell := {"figures": figures})
        from_first(lambda: shutil.rmtree(place, ignore_errors=True))  # only now: a kill leaves both or the cell
        found[step] = cell
        done += 1
        progress("evaluated states", done, len(steps))

    # Training is repeated up to the last step that is missing; what was measured is not.
    missing = set(steps) - set(found)
    if missing:
        model, _ = load(which, request.loading, joined_device())
        relearn(model, tokenizer, shown, request.attack, seed, missing, observe, request.out)
        del model
        gc.collect()
        empty_device_cache()
    cells: list[RelearnCell] = [
        {"role": role, "share": share, "seed": seed, "step": step, "figures": found[step]["figures"]} for step in steps
    ]
    return len(shown), cells


def _samples(request: RelearnRequest, tokenizer: Any, which: Model, source: str) -> Any:
    form = request.measure.chat_format(tokenizer, which.source)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return load_samples(source, tokenizer, max_length=request.max_length, limit=request.limit, chat_format=form).samples


def courses(cells: Sequence[RelearnCell], metric: str, share: float) -> dict[str, dict[int, dict[int, float]]]:
    """Role → seed → step → value."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    for cell in cells:
        if cell["share"] == share and metric in cell["figures"]:
            found.setdefault(cell["role"], {}).setdefault(cell["seed"], {})[cell["step"]] = cell["figures"][metric]
    return found


def summary(cells: Sequence[RelearnCell], remembered: Sequence[str]) -> list[dict[str, Any]]:
    """For each share and metric what the curves say, seed by seed and as mean and standard deviation."""
    lines = []
    for share in dict.fromkeys(cell["share"] for cell in cells):
        for metric in remembered:
            by_role = courses(cells, metric, share)
            if UNLEARNED in by_role:
                lines.append({"share": share, "metric": metric, **_line(by_role)})
    return lines


def _line(by_role: Mapping[str, Mapping[int, Mapping[int, float]]]) -> dict[str, Any]:
    per_seed: dict[str, dict[str, Any]] = {}
    for seed, course in by_role[UNLEARNED].items():
        values: dict[str, Any] = {"before": course[min(course)], "after": course[max(course)], "gain": gain(course)}
        if RETAIN in by_role:
            other = by_role[RETAIN][seed]
            values |= {
                "retain_gain": gain(other),
                "R": robustness(gain(course), gain(other)),
                "R_symmetric": symmetric(gain(course), gain(other)),
                "area": area_between(course, other),
            }
        if INITIAL in by_role:
            first = by_role[INITIAL][seed]
            start = first[min(first)]
            values |= {"gap": start - course[min(course)], "half": steps_to_half(course, start)}
            if RETAIN in by_role:
                values["retain_half"] = steps_to_half(by_role[RETAIN][seed], start)
        per_seed[str(seed)] = values
    keys = dict.fromkeys(key for values in per_seed.values() for key in values)
    known = {key: [v[key] for v in per_seed.values() if v.get(key) is not None] for key in keys}
    # Steps are not averaged over seeds of which some never get there.
    usable = {key: found for key, found in known.items() if len(found) == len(per_seed)}
    return {
        "per_seed": per_seed,
        "mean": {key: mean(found) for key, found in usable.items()},
        "spread": {key: stdev(found) for key, found in usable.items() if len(found) > 1},
    }
