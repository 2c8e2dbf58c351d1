"""A study as plain data: what ``trials.json`` holds, and what tables and plots are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import RetryHeartbeatStaleTrialCallback as Retry
from optuna.trial import FrozenTrial, TrialState

from ... import __version__
from ...errors import DataError
from ...evaluation.tofu.loading import ADAPTER
from .search import ERROR, FIGURES, MODEL, REFERENCES, SCORED, trial_folder
from .study import CONDITIONS
from .task import SELECTED_BY, SweepTask

SCHEMA = "rosu/sweep/1"
DESCRIPTION = "description"
DONE, KILLED = "done", "killed"
_STATES = {
    TrialState.COMPLETE: DONE,
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}
#: From so many finished trials on, importance is more than chance.
ENOUGH = 8


def describe(study: optuna.Study, task: SweepTask, seed: int) -> None:
    """Leave in the study what is needed to show it without its recipe."""
    study.set_user_attr(
        DESCRIPTION,
        {
            "task": task.name,
            "objective": {"name": SELECTED_BY, "direction": "maximize", "definition": task.definition},
            "pruned_by": task.glance_definition,
            "recipe": dict(task.base),
            "seed": seed,
            "notes": list(task.notes),
            "headings": dict(task.headings),
        },
    )


def collect(study: optuna.Study, out: Path) -> dict[str, Any]:
    """Everything about a study; see ``docs/sweep.md`` for its keys."""
    about, conditions = (study.user_attrs.get(name) for name in (DESCRIPTION, CONDITIONS))
    if about is None or conditions is None:
        raise DataError(f"Study {study.study_name!r} has nothing to show: rosu sweep has not run a trial in it.")
    trials = study.get_trials(deepcopy=False)
    ranked = sorted((t for t in trials if t.state == TrialState.COMPLETE), key=lambda t: (-(t.value or 0.0), t.number))
    ranks = {trial.number: at for at, trial in enumerate(ranked, 1)}
    records = [_record(trial, ranks.get(trial.number), out) for trial in trials]
    return {
        "schema": SCHEMA,
        "study": study.study_name,
        **about,
        "space": conditions["space"],
        "evaluation": conditions["evaluation"],
        "references": study.user_attrs.get(REFERENCES, {}),
        "best": ranked[0].number if ranked else None,
        "pareto": pareto([record for record in records if record["state"] == DONE]),
        "importance": importance(study, len(ranked)),
        "trials": records,
        "versions": {"rosu_llm": __version__, **{name: version(name) for name in ("optuna", "torch", "transformers")}},
    }


def _record(trial: FrozenTrial, rank: int | None, out: Path) -> dict[str, Any]:
    attrs, state, folder = trial.user_attrs, _STATES[trial.state], trial_folder(out, trial.number)
    if state == "failed" and ERROR not in attrs:
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


def pareto(done: Sequence[Mapping[str, Any]]) -> list[int]:
    """Numbers of the trials that no other beats in Mem or Util without losing in the other."""
    points = {record["number"]: (record["scores"]["Mem"], record["scores"]["Util"]) for record in done}
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
