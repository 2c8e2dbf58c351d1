"""Trials until there are enough: train, measure, hand Agg_MU to Optuna; what fails is recorded and the others go on."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import optuna
from optuna.study import MaxTrialsCallback
from optuna.trial import FrozenTrial, Trial, TrialState

from ...errors import DataError, NonFiniteError, RosuError, one_line
from ...recipes.next_token import chat_format, remember_format
from ...recipes.record import write_record
from ...recipes.settings import RunArguments, type_values
from ..task import unlearn
from .pruning import Reports
from .sampler import Grid
from .space import Space
from .study import COUNTED, TRIALS, agree, disagree, reclaim, repeat
from .task import SELECTED_BY, References, SweepTask
from .worker_lock import Presence, alone

KEEP = ("best", "all", "none")
#: So many failures before the first success say that the recipe is wrong, not the settings.
HOPELESS = 3

#: Names of attributes of the study and of its trials.
REFERENCES, FIGURES, SCORED, ERROR, WORKER, MODEL = "references", "figures", "scores", "error", "worker", "model"


class Watcher(Protocol):
    """Is told what happens."""

    def started(self, number: int, settings: Mapping[str, Any]) -> None: ...

    def steps(self, done: int, total: int) -> None: ...

    def finished(self, trial: FrozenTrial) -> None: ...


@dataclass(frozen=True)
class Sweep:
    """A search that can be run.

    Attributes:
        conditions: what the figures depend on, the same for all workers.
        trials: how many shall be finished or pruned in the whole study, whoever ran them.
        fractions: of a run at which pruning may end it; none for no pruning.
        keep: whose models stay: those of ``all`` trials, of the ``best`` so far, or of ``none``.
    """

    study: optuna.Study
    task: SweepTask
    space: Space
    conditions: Mapping[str, Any]
    out: Path
    trials: int
    timeout: float | None = None
    fractions: Sequence[float] = ()
    keep: str = "best"

    @property
    def workers(self) -> Path:
        """Where workers leave their locks."""
        return self.out / "workers"


def run_sweep(sweep: Sweep, sampler: optuna.samplers.BaseSampler, watcher: Watcher) -> str | None:
    """Run trials until the study has enough of them, time is up, or nothing works; then it says why."""
    study = sweep.study
    reclaim(study, sweep.workers)
    study.sampler = sampler
    counted = study.get_trials(deepcopy=False, states=COUNTED)
    if len(counted) >= sweep.trials or (isinstance(sampler, Grid) and sampler.is_exhausted(study)):
        return None
    references = _references(sweep, watcher)
    with Presence(sweep.workers) as presence:
        objective = _Objective(sweep, references, watcher, presence.name)
        patience = _Patience(sweep.trials)
        callbacks: list[Callable[[optuna.Study, FrozenTrial], None]] = [
            lambda _, trial: watcher.finished(trial),
            lambda _, __: _tidy(sweep),
            MaxTrialsCallback(sweep.trials, states=COUNTED),
            patience,
        ]
        try:
            study.optimize(
                objective, timeout=sweep.timeout, callbacks=callbacks, catch=(Exception,), gc_after_trial=True
            )
        except KeyboardInterrupt:
            if objective.running is not None:
                repeat(study, study.trials[objective.running])
            raise
    return patience.reason


def _references(sweep: Sweep, watcher: Watcher) -> References:
    """Measured once for the whole study, by whoever comes first."""
    study, task = sweep.study, sweep.task
    with alone(sweep.workers / REFERENCES):
        known = study.user_attrs.get(REFERENCES)
        if known is None:
            try:
                figures = task.refer(watcher.steps)
            except BaseException:
                disagree(study)
                raise
            known = {name: {"figures": own, "scores": task.scores(own, figures)} for name, own in figures.items()}
            agree(study, sweep.conditions)  # another worker may have failed and taken them back
            study.set_user_attr(REFERENCES, known)
        return {name: entry["figures"] for name, entry in known.items()}


class _Objective:
    """One trial; ``running`` is the number of one that has neither ended nor failed."""

    def __init__(self, sweep: Sweep, references: References, watcher: Watcher, worker: str) -> None:
        self._sweep, self._references, self._watcher, self._worker = sweep, references, watcher, worker
        self.running: int | None = None

    def __call__(self, trial: Trial) -> float:
        self.running = trial.number
        trial.set_user_attr(WORKER, self._worker)
        settings = self._sweep.space.suggest(trial)
        self._watcher.started(trial.number, settings)
        folder = trial_folder(self._sweep.out, trial.number)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            value = self._run(trial, settings, folder)
        except Exception as error:
            if not isinstance(error, optuna.TrialPruned):
                name = "" if isinstance(error, RosuError) else f"{type(error).__name__}: "
                trial.set_user_attr(ERROR, (name + one_line(error))[:500])
            shutil.rmtree(folder, ignore_errors=True)
            self.running = None
            raise
        self.running = None
        return value

    def _run(self, trial: Trial, settings: Mapping[str, Any], folder: Path) -> float:
        sweep, task = self._sweep, self._sweep.task
        trainer, measure, glance = task.start({**task.base, **settings}, self._references, folder, self._watcher.steps)
        reports = Reports(trial, sweep.fractions, glance)
        trainer.add_callback(reports)
        start = perf_counter()
        unlearn(trainer, keep=False, steps=self._watcher.steps)
        seconds = perf_counter() - start
        if reports.pruned is not None:
            raise optuna.TrialPruned(f"at {reports.pruned} % of the run")
        figures = measure()
        broken = [name for name, figure in figures.items() if not math.isfinite(figure)]
        if broken:
            raise NonFiniteError(f"The model is broken: {', '.join(broken)} is not finite after training.")
        scores = task.scores(figures, self._references)
        value = scores[SELECTED_BY]
        if value is None:
            raise DataError(f"{SELECTED_BY} cannot be formed from what was measured: {', '.join(sorted(figures))}.")
        if sweep.keep == "all" or (sweep.keep == "best" and value > best_value(sweep.study)):
            _save(trainer, {**task.base, **settings}, seconds)
            trial.set_user_attr(MODEL, True)
        trial.set_user_attr(FIGURES, figures)
        trial.set_user_attr(SCORED, scores)
        return value


def _save(trainer: Any, values: Mapping[str, Any], seconds: float) -> None:
    """All that ``rosu train`` leaves of a run."""
    # Not through build(): making another TrainingArguments would reset the state that the trainer still uses.
    names = {f.name for f in fields(RunArguments)}
    arguments = RunArguments(**{key: value for key, value in type_values(values)[1].items() if key in names})
    trainer.save_model()
    trainer.create_model_card()
    remember_format(chat_format(arguments, trainer.processing_class), Path(trainer.args.output_dir))
    write_record(trainer, arguments, seconds)


def finished(study: optuna.Study) -> int:
    """How many trials came to an end with a value."""
    return len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))


def trial_folder(out: Path, number: int) -> Path:
    """Where a trial's model and evaluation lie."""
    return out / TRIALS / f"{number:04d}"


def best_value(study: optuna.Study) -> float:
    """The highest Agg_MU of a finished trial."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return max((float(trial.value) for trial in finished if trial.value is not None), default=-math.inf)


def _tidy(sweep: Sweep) -> None:
    """Drop the models that are best no more; their evaluations stay."""
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


class _Patience:
    """Stops a study in which nothing works; ``reason`` says why then."""

    def __init__(self, trials: int) -> None:
        self._trials, self._failures = trials, 0
        self.reason: str | None = None

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:
        if trial.state != TrialState.FAIL:
            return
        self._failures += 1
        worked = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        if self._failures >= (self._trials if worked else min(HOPELESS, self._trials)):
            last = trial.user_attrs.get(ERROR, "unknown error")
            none = "" if worked else " and none worked"
            self.reason = f"{self._failures} trials failed{none}, so the search stopped. The last one: {last}"
            study.stop()
