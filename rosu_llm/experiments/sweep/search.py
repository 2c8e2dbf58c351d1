"""Trials until there are enough: attempts whose Agg_MU goes to Optuna; what fails is recorded and the others go on."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import optuna
from optuna.study import MaxTrialsCallback
from optuna.trial import FrozenTrial, Trial, TrialState
from transformers import TrainerCallback

from ...errors import DataError, RosuError
from ...recipes.run import save
from ...recipes.settings import RunArguments, type_values
from ..attempt import DONE, FAILED, PRUNED, AttemptObserver, Figures, Started, Task, attempt
from .sampler import ResumableGridSampler
from .scoring import REFERENCE_NAMES, SELECTED_BY, References, Scores, Scoring
from .space import Space
from .study import COUNTED, TRIALS, WORKERS, clear_conditions, exclusive, pin_conditions, reclaim, requeue, worker_lock

KEEP = ("best", "all", "none")
#: After so many failures without any success the recipe is wrong, not the settings.
FAILURES_AT_FIRST = 3

#: Names of attributes of the study and of its trials.
REFERENCES, FIGURES, SCORED, ERROR, WORKER, MODEL = "references", "figures", "scores", "error", "worker", "model"


@dataclass(frozen=True)
class Sweep:
    """A search that can be run.

    Attributes:
        conditions: what the figures depend on, the same for all workers.
        trials: how many to finish or prune in the whole study, whichever worker runs them.
        fractions: of a run at which pruning may end it; none for no pruning.
        keep: whose models stay: those of ``all`` trials, of the ``best`` so far, or of ``none``.
    """

    study: optuna.Study
    task: Task
    scoring: Scoring
    seed: int
    space: Space
    conditions: Mapping[str, Any]
    out: Path
    trials: int
    timeout: float | None = None
    fractions: Sequence[float] = ()
    keep: str = "best"


def run_sweep(sweep: Sweep, sampler: optuna.samplers.BaseSampler, observer: AttemptObserver) -> str | None:
    """Run trials until there are enough, time is up, or nothing works, which is then the text returned."""
    study, locks = sweep.study, sweep.out / WORKERS
    reclaim(study, locks)
    study.sampler = sampler
    exhausted = isinstance(sampler, ResumableGridSampler) and sampler.is_exhausted(study)
    if exhausted or len(study.get_trials(deepcopy=False, states=COUNTED)) >= sweep.trials:
        return None
    references = _references(sweep, observer)
    with worker_lock(locks) as name:
        worker = _Worker(sweep, references, observer, name)
        enough = MaxTrialsCallback(sweep.trials, states=COUNTED)
        try:
            study.optimize(
                worker, timeout=sweep.timeout, callbacks=[worker.ended, enough], catch=(Exception,), gc_after_trial=True
            )
        except KeyboardInterrupt:
            for trial in study.get_trials(deepcopy=False, states=(TrialState.FAIL,)):
                if trial.user_attrs.get(WORKER) == name and ERROR not in trial.user_attrs:  # the interrupted one
                    requeue(study, trial)
            raise
    return worker.reason


def _references(sweep: Sweep, observer: AttemptObserver) -> References:
    """Measured once for the whole study, by the first worker."""
    study, task = sweep.study, sweep.task
    with exclusive(sweep.out / WORKERS / REFERENCES):
        known = study.user_attrs.get(REFERENCES)
        if known is None:
            try:
                figures = {
                    REFERENCE_NAMES[name]: dict(task.refer(name, sweep.seed, observer.steps).measure())
                    for name in task.references
                }
            except BaseException:
                clear_conditions(study)
                raise
            score = sweep.scoring.scores
            known = {name: {"figures": own, "scores": score(own, figures)} for name, own in figures.items()}
            pin_conditions(study, sweep.conditions)  # another worker may have failed and cleared them
            study.set_user_attr(REFERENCES, known)
        return {name: entry["figures"] for name, entry in known.items()}


class _Worker:
    """Runs one trial after the other; ``reason`` is why it stopped the search, if nothing works."""

    def __init__(self, sweep: Sweep, references: References, observer: AttemptObserver, name: str) -> None:
        self._sweep, self._references, self._observer, self._name = sweep, references, observer, name
        self._failures = 0
        self.reason: str | None = None

    def __call__(self, trial: Trial) -> float:
        """The objective."""
        sweep, steps = self._sweep, self._observer.steps
        trial.set_user_attr(WORKER, self._name)
        settings = sweep.space.suggest(trial)
        self._observer.started(trial_label(trial.number, settings))
        values, folder = {**sweep.task.base, **settings}, trial_folder(sweep.out, trial.number)
        scores: Scores = {}

        def start() -> Started:
            started = sweep.task.start(values, sweep.seed, folder, steps)
            glance = started.glance or (lambda: self._scores(started.measure())[SELECTED_BY] or 0.0)
            pruning = PruningCallback(trial, sweep.fractions, glance)
            started.trainer.add_callback(pruning)

            def measure() -> Figures:
                if pruning.pruned_at is not None:  # raised only now that the trainer has put everything in order
                    raise optuna.TrialPruned(f"at {pruning.pruned_at} % of the run")
                return started.measure()

            return started._replace(measure=measure, details=None)

        def keep(started: Started, figures: Figures, seconds: float) -> bool:
            scores.update(self._scores(figures))
            value = scores[SELECTED_BY]
            if value is None:
                raise DataError(f"{SELECTED_BY} cannot be formed from what was measured: {', '.join(sorted(figures))}.")
            if sweep.keep == "all" or (sweep.keep == "best" and value > best_value(sweep.study)):
                # Not through build(): another TrainingArguments would reset the state that the trainer still uses.
                typed = type_values(values)[1]
                own = {f.name: typed[f.name] for f in fields(RunArguments) if f.name in typed}
                save(started.trainer, RunArguments(**own), seconds)
                trial.set_user_attr(MODEL, True)
            return True  # for the evaluation, even where the model is not kept

        result = attempt(start, folder, steps, keep, reraise=(optuna.TrialPruned,))
        if result.error:
            trial.set_user_attr(ERROR, result.error)
            raise RosuError(result.error)
        trial.set_user_attr(FIGURES, result.metrics)
        trial.set_user_attr(SCORED, scores)
        return float(scores[SELECTED_BY] or 0.0)

    def ended(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Report a trial, drop models that are best no more, and stop a study in which nothing works."""
        self._observer.finished(trial_label(trial.number, trial.params), *_ending(trial))
        _delete_beaten_models(self._sweep)
        if trial.state != TrialState.FAIL:
            return
        self._failures += 1
        worked, most = finished(study), self._sweep.trials
        if self._failures >= (most if worked else min(FAILURES_AT_FIRST, most)):
            last = trial.user_attrs.get(ERROR, "unknown error")
            none = "" if worked else " and none worked"
            self.reason = f"{self._failures} trials failed{none}, so the search stopped. The last one: {last}"
            study.stop()

    def _scores(self, figures: Figures) -> Scores:
        return self._sweep.scoring.scores(figures, self._references)


class PruningCallback(TrainerCallback):
    """Report ``glance()`` at fractions of the run, under the percentage as Optuna's step.

    When the pruner decides against the trial, training stops after the step, and ``pruned_at`` is the percentage.
    """

    def __init__(self, trial: Trial, fractions: Sequence[float], glance: Callable[[], float]) -> None:
        self._trial, self._fractions, self._glance = trial, sorted(fractions), glance
        self.pruned_at: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = {math.ceil(fraction * state.max_steps): round(100 * fraction) for fraction in self._fractions}
        percent = due.get(state.global_step)
        if percent is None or state.global_step >= state.max_steps:
            return
        self._trial.report(self._glance(), percent)
        if self._trial.should_prune():
            self.pruned_at = percent
            control.should_training_stop = True


def trial_label(number: int, settings: Mapping[str, Any]) -> str:
    """A trial with its settings on one line."""
    shown = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in settings.items())
    return f"trial {number}: {', '.join(shown)}"


def _ending(trial: FrozenTrial) -> tuple[str, str]:
    """Status of a trial that ended, and its scores, last reported value or error."""
    if trial.state == TrialState.COMPLETE:
        scores = trial.user_attrs[SCORED].items()
        return DONE, ", ".join(f"{name} {score:.3f}" for name, score in scores if score is not None)
    if trial.state == TrialState.PRUNED:
        last = sorted(trial.intermediate_values.items())[-1:]
        return PRUNED, "".join(f"at {percent} % with {value:.3f}" for percent, value in last)
    return FAILED, trial.user_attrs.get(ERROR, "")


def finished(study: optuna.Study) -> int:
    """How many trials came to an end with a value."""
    return len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))


def trial_folder(out: Path, number: int) -> Path:
    """Where a trial's model and evaluation lie."""
    return out / TRIALS / f"{number:04d}"


def best_value(study: optuna.Study) -> float:
    """The highest Agg_MU of a finished trial."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return max((float(trial.value) for trial in complete if trial.value is not None), default=-math.inf)


def _delete_beaten_models(sweep: Sweep) -> None:
    """With ``keep="best"``, drop the models that are best no more; their evaluations stay."""
    if sweep.keep != "best":
        return
    best = best_value(sweep.study)
    for trial in sweep.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        folder = trial_folder(sweep.out, trial.number)
        if trial.value is not None and trial.value < best and folder.is_dir():
            for path in [path for path in folder.iterdir() if path.name != "evals"]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()
