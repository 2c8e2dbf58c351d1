"""Values on the way, by which Optuna may end a trial early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

from optuna.trial import Trial
from transformers import TrainerCallback


class Reports(TrainerCallback):
    """Report ``glance()`` at fractions of the run, under the percentage as Optuna's step.

    When the pruner decides against the trial, training is asked to stop after the step, and ``pruned`` is set; the
    exception is left to the caller, so that the trainer has put everything in order before it is raised.
    """

    def __init__(self, trial: Trial, fractions: Sequence[float], glance: Callable[[], float]) -> None:
        self._trial, self._fractions, self._glance = trial, sorted(fractions), glance
        self.pruned: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = {ceil(fraction * state.max_steps): round(100 * fraction) for fraction in self._fractions}
        percent = due.get(state.global_step)
        if percent is None or state.global_step >= state.max_steps:
            return
        self._trial.report(self._glance(), percent)
        if self._trial.should_prune():
            self.pruned = percent
            control.should_training_stop = True
