"""How Optuna proposes settings, so that a search that was interrupted goes on as if it had not been.

Optuna's samplers draw from one stream that starts anew in every process: a resumed random search would propose its
first trials again, and so would every further worker. Here each trial has a stream of its own, from the seed and the
trial's place in the search, where trials that were killed and run again count once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, GridSampler, RandomSampler, TPESampler
from optuna.storages import RetryHeartbeatStaleTrialCallback as Retry
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from ...errors import ConfigError, unknown
from .space import Space
from .study import COUNTED

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("median", "hyperband", "none")
_GRID_ID = "grid_id"  # Optuna's mark on the trials of its grid


def make_sampler(name: str, space: Space, seed: int) -> BaseSampler:
    """The sampler called ``name``."""
    if name in ("tpe", "random"):
        return PerTrialSampler(TPESampler if name == "tpe" else RandomSampler, seed)
    if name == "grid":
        return ResumableGridSampler({axis.key: axis.values() for axis in space.axes}, seed=seed)
    raise unknown("sampler", name, SAMPLERS)


def make_pruner(name: str, fractions: Sequence[float]) -> BasePruner:
    """The pruner called ``name``; its steps are percent of a run."""
    for fraction in fractions:
        if not 0 < fraction < 1:
            raise ConfigError(
                f"--report-at {fraction:g} is no point inside a run: give fractions such as 0.25 0.5 0.75."
            )
    if name == "median":
        return MedianPruner()
    if name == "hyperband":
        return HyperbandPruner(min_resource=max(1, round(100 * min(fractions))), max_resource=100)
    if name == "none":
        return NopPruner()
    raise unknown("pruner", name, PRUNERS)


def place(study: Study, trial: FrozenTrial) -> int:
    """How many trials were proposed before this one; one that is run again has the place of the first attempt."""
    first = Retry.retried_trial_number(trial)
    number = trial.number if first is None else first
    return sum(Retry.retried_trial_number(other) is None for other in _all_trials(study) if other.number < number)


def _all_trials(study: Study) -> list[FrozenTrial]:
    """Of the whole study: Hyperband hands samplers one that shows the trials of a single bracket."""
    return study._storage.get_all_trials(study._study_id, deepcopy=False)


class PerTrialSampler(BaseSampler):
    """A new sampler for each trial, seeded by its place."""

    def __init__(self, make: Callable[..., BaseSampler], seed: int) -> None:
        self._make, self._seed = make, seed
        self._inner = make(seed=seed)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._inner = self._make(seed=(self._seed * 1_000_003 + place(study, trial)) % 2**32)
        self._inner.before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._inner.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._inner.sample_relative(study, trial, search_space)

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        self._inner.after_trial(study, trial, state, values)


def grid_size(space: Space, study: Study) -> int:
    """How many trials the study will count when all combinations were tried: those of other samplers come on top."""
    others = sum(_GRID_ID not in trial.system_attrs for trial in _all_trials(study) if trial.state in COUNTED)
    return others + prod(len(axis.values()) for axis in space.axes)


class ResumableGridSampler(GridSampler):
    """Every combination once, whichever worker runs it; failed trials are not repeated, killed ones are.

    Optuna's own counts a killed trial as done, so it stops before the repetition, and it starts over at the end.
    """

    def is_exhausted(self, study: Study) -> bool:
        trials = _all_trials(study)
        taken = {trial.system_attrs[_GRID_ID] for trial in trials if _GRID_ID in trial.system_attrs}
        return len(taken) == len(self._all_grids) and all(trial.state != TrialState.WAITING for trial in trials)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        if self.is_exhausted(study):
            study.stop()
