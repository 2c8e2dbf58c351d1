"""A study as plain data: the content of ``trials.json``, which tables, plots and reports are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

import optuna
from optuna.storages import RetryHeartbeatStaleTrialCallback as Retry
from optuna.trial import FrozenTrial, TrialState

from ... import __version__
from ...errors import DataError
from ...evaluation.model_identity import ADAPTER
from ..attempt import DONE, FAILED, KILLED, PRUNED, RUNNING, WAITING
from .scoring import SELECTED_BY, Scoring
from .search import ERROR, FIGURES, MODEL, REFERENCES, SCORED, trial_folder
from .study import CONDITIONS

SCHEMA = "rosu/sweep/1"
DESCRIPTION = "description"
_STATES = {
    TrialState.COMPLETE: DONE,
    TrialState.PRUNED: PRUNED,
    TrialState.FAIL: FAILED,
    TrialState.RUNNING: RUNNING,
    TrialState.WAITING: WAITING,
}
#: From so many finished trials on, importance is more than chance.
ENOUGH = 8


class TrialDocument(TypedDict):
    """One trial; ``model`` and ``evaluation`` are folders below that of the study, where they exist."""

    number: int
    rank: int | None  # by Agg_MU, from 1; None unless done
    state: str
    again_for: int | None  # the killed trial that it repeats
    settings: dict[str, Any]
    scores: dict[str, float | None]
    figures: dict[str, float]
    intermediate: dict[str, float]  # percent of the run → value that the pruner saw
    seconds: float | None
    error: str | None
    model: str | None
    evaluation: str | None


class SweepDocument(TypedDict):
    """The content of ``trials.json``."""

    schema: str
    study: str
    task: str
    objective: dict[str, str]
    pruned_by: str
    recipe: dict[str, Any]  # the settings that every trial starts from
    seed: int
    notes: list[str]
    headings: dict[str, str]  # score → heading of its column
    space: dict[str, dict[str, Any]]  # setting → its choices or range
    evaluation: dict[str, Any]  # what figures depend on besides settings
    references: dict[str, Any]  # "initial" and "retain", as far as they are known, with figures and scores
    best: int | None
    pareto: list[int]  # trials on the frontier of Mem and Util
    importance: dict[str, float] | None  # setting → its share of the variance of Agg_MU
    trials: list[TrialDocument]
    versions: dict[str, str]


def describe(study: optuna.Study, scoring: Scoring, recipe: Mapping[str, Any], seed: int) -> None:
    """Leave in the study what is needed to show it without its recipe."""
    description = {
        "task": scoring.name,
        "objective": {"name": SELECTED_BY, "direction": "maximize", "definition": scoring.definition},
        "pruned_by": scoring.glance_definition,
        "recipe": dict(recipe),
        "seed": seed,
        "notes": list(scoring.notes),
        "headings": dict(scoring.headings),
    }
    study.set_user_attr(DESCRIPTION, description)


def collect(study: optuna.Study, out: Path) -> SweepDocument:
    """Everything about a study."""
    about = study.user_attrs.get(DESCRIPTION)
    conditions = study.user_attrs.get(CONDITIONS)
    if about is None or conditions is None:
        raise DataError(f"Study {study.study_name!r} has nothing to show: rosu sweep has not run a trial in it.")
    trials = study.get_trials(deepcopy=False)
    ranked = sorted((t for t in trials if t.state == TrialState.COMPLETE), key=lambda t: (-(t.value or 0.0), t.number))
    ranks = {trial.number: at for at, trial in enumerate(ranked, 1)}
    records = [_trial(trial, ranks.get(trial.number), out) for trial in trials]
    document: SweepDocument = {  # ``about`` is what :func:`describe` left
        "schema": SCHEMA,
        "study": study.study_name,
        **about,  # type: ignore[typeddict-item]
        "space": conditions["space"],
        "evaluation": conditions["evaluation"],
        "references": study.user_attrs.get(REFERENCES, {}),
        "best": ranked[0].number if ranked else None,
        "pareto": pareto([record for record in records if record["state"] == DONE]),
        "importance": importance(study, len(ranked)),
        "trials": records,
        "versions": {"rosu_llm": __version__, **{name: version(name) for name in ("optuna", "torch", "transformers")}},
    }
    return document


def _trial(trial: FrozenTrial, rank: int | None, out: Path) -> TrialDocument:
    attrs, state, folder = trial.user_attrs, _STATES[trial.state], trial_folder(out, trial.number)
    if state == FAILED and ERROR not in attrs:
        state = KILLED
    done = state == DONE
    evaluation = folder / "evals"
    kept = done and attrs.get(MODEL) and any((folder / name).is_file() for name in ("config.json", ADAPTER))
    return {
        "number": trial.number,
        "rank": rank,
        "state": state,
        "again_for": Retry.retried_trial_number(trial),
        "settings": dict(trial.params),
        "scores": attrs.get(SCORED, {}) if done else {},
        "figures": attrs.get(FIGURES, {}) if done else {},
        "intermediate": {str(step): value for step, value in sorted(trial.intermediate_values.items())},
        "seconds": round(trial.duration.total_seconds(), 2) if trial.duration else None,
        "error": attrs.get(ERROR),
        "model": str(folder.relative_to(out)) if kept else None,
        "evaluation": str(evaluation.relative_to(out)) if done and evaluation.is_dir() else None,
    }


def pareto(done: Sequence[TrialDocument]) -> list[int]:
    """Numbers of the trials that no other beats in Mem or Util without losing in the other."""
    points = {record["number"]: (record["scores"]["Mem"] or 0.0, record["scores"]["Util"] or 0.0) for record in done}
    return [
        number
        for number, (mem, util) in points.items()
        if not any(m >= mem and u >= util and (m, u) != (mem, util) for m, u in points.values())
    ]


def importance(study: optuna.Study, finished: int) -> dict[str, float] | None:
    """Optuna's fANOVA shares; None with too few trials or without scikit-learn."""
    if finished < ENOUGH:
        return None
    try:
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    except (ImportError, RuntimeError, ValueError):
        return None
    return {name: float(share) for name, share in shares.items()}
