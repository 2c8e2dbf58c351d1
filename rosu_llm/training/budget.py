"""A budget for what is to be kept: where it is exceeded the run goes back, pulls less, and goes on.

Every so many steps data that takes no part in training is measured: how far its loss has risen, or how far the model's
next-token distributions have moved from the initial ones (:mod:`rosu_llm.training.drift`). Inside the budget the
weights and the optimizer's state are noted; outside they return to the last note, and from then on first the pull and
then the learning rate is halved. After a number of such returns the run stops with the noted weights. The last step is
looked at in any case, so no run ends outside. The note travels with the checkpoints, so that a resumed run returns to
the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback

from ..errors import ConfigError, DataError
from ..files import part_of
from ..step import UnlearningStep
from .config import MethodArguments

logger = logging.getLogger(__name__)

#: One file for each process that holds a part of its own.
NOTE_FILE = "rosu_budget_{rank}.safetensors"
_NUMBERS = (int, float)


class Budget(TrainerCallback):
    """Watches one run.

    Args:
        settings: ``budget`` and what belongs to it.
        measure: the loss of the budget data under the weights the model has now, or the KL from the initial model.
        log: takes values to be logged.
    """

    def __init__(
        self, settings: MethodArguments, measure: Callable[[], float], log: Callable[[Mapping[str, float]], None]
    ) -> None:
        self._settings, self._measure, self._log = settings, measure, log
        self._absolute = settings.budget_measure == "kl"
        self._step: UnlearningStep | None = None
        self._note: dict[str, Tensor] = {}
        self._looked_at = 0
        #: Numbers of the optimizer's state, which belong to the note; and the rise there.
        self.numbers: dict[str, float] = {}
        self.noted_rise = 0.0
        self.initial: float | None = None
        self.returns = 0
        #: Of the learning rate.
        self.halvings = 0
        self.noted_at = self.returned_at = 0

    @property
    def spent(self) -> bool:
        """Whether the run has stopped for good: it went back more often than it may."""
        return self.returns > self._settings.budget_tries

    def begin(self, step: UnlearningStep) -> None:
        """Before the first step of a run or of its continuation."""
        if self._step is step:
            return
        self._step = step
        if not self._note:
            self._begin_afresh()
        step.pull_scale = 0.5 ** ((self.returns + 1) // 2)

    def _begin_afresh(self) -> None:
        value = self._measure()
        if not (isfinite(value) and (self._absolute or value > 0.0)):
            what = "KL" if self._absolute else "loss"
            raise DataError(
                f"The {what} of the budget data is {value} before the first step, so that its rise says nothing: "
                "check that it has answers."
            )
        self.initial = value if self.initial is None else self.initial
        rise, budget = self._rise(value), float(self._settings.budget or 0.0)
        if rise > budget:
            raise ConfigError(
                f"budget={budget} is exceeded before the first step: after an earlier training of this model "
                f"{self._told(rise)}. Start from the model as it was, or raise the budget."
            )
        self._take_note(0, rise)

    def _rise(self, value: float) -> float:
        """What counts against the budget: the KL itself, or the relative rise of the loss."""
        assert self.initial is not None
        return value if self._absolute else value / self.initial - 1.0

    def _told(self, rise: float) -> str:
        if self._absolute:
            return f"the KL from the initial model is {rise:.3g} nats per token of the budget data"
        return f"the budget loss rose by {rise:.1%}"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Look at the budget data if it is due, and go back where it is exceeded."""
        last = state.global_step >= state.max_steps
        if self._step is None or (state.global_step % self._settings.budget_every and not last):
            return control
        where = self._look(state.global_step)
        if not where:
            return control
        if last:
            logger.warning("%s, and end there.", where)
        elif self.spent:
            logger.warning("%s, and stop: the budget was exceeded %d times.", where, self.returns)
            control.should_training_stop = True
        elif self.returns % 2 and self._step.rule.pulls:
            self._step.pull_scale *= 0.5
            logger.warning("%s; the pull is now %g of what it was.", where, self._step.pull_scale)
        else:
            scale_learning_rate(self._step.optimizer, 0.5, kwargs.get("lr_scheduler"))
            self.halvings += 1
            logger.warning("%s; the learning rate is halved.", where)
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the last step of a run that something else has stopped."""
        if self._step is not None and self._looked_at != state.global_step and (where := self._look(state.global_step)):
            logger.warning("%s, and end there.", where)

    def _look(self, at: int) -> str:
        """Note the weights if they are inside the budget; else go back, and return what is to be told of it."""
        assert self._settings.budget is not None
        value, self._looked_at = self._measure(), at
        rise, name = self._rise(value), "budget/kl" if self._absolute else "budget/loss"
        outside = not rise <= self._settings.budget
        if outside:
            self.returns += 1
            self._go_back()
            self.returned_at = at
        else:
            self._take_note(at, rise)
        self._log({name: value, "budget/rise": rise, "budget/returns": float(self.returns)})
        return f"step {at}: {self._told(rise)}, back to step {self.noted_at}" if outside else ""

    def _take_note(self, at: int, rise: float) -> None:
        assert self._step is not None
        self._note = {name: value.detach().to("cpu", copy=True) for name, value in self._tensors().items()}
        self.numbers = {name: own[key] for name, own, key in self._counts()}
        self.noted_at, self.noted_rise = at, rise

    @torch.no_grad()
    def _go_back(self) -> None:
        assert self._step is not None
        state = self._step.optimizer.state
        noted = [int(name.split(".")[1]) for name in self._note if name.startswith("state.")]
        noted += [int(name.split(".")[0]) for name in self.numbers]
        for parameter in list(state)[max(noted, default=-1) + 1 :]:  # their first step came after the note
            del state[parameter]
        for name, value in self._tensors().items():
            value.copy_(self._note[name])
        for name, own, key in self._counts():
            own[key] = self.numbers[name]
        self._step.space.weights_changed()

    def _tensors(self) -> dict[str, Tensor]:
        """Everything an update changes, by name: the weights and the optimizer's state, as this process holds them."""
        assert self._step is not None
        found = {f"weight.{i}": w for i, w in enumerate(self._step.space.weights())}
        for i, own in enumerate(self._step.optimizer.state.values()):
            for name, value in own.items():
                if isinstance(value, Tensor):
                    found[f"state.{i}.{name}"] = value.to_local() if hasattr(value, "to_local") else value
        return found

    def _counts(self) -> list[tuple[str, dict[str, Any], str]]:
        """Where the optimizer's state holds numbers of its own, as Adafactor's does: name, state, key."""
        assert self._step is not None
        states = enumerate(self._step.optimizer.state.values())
        return [(f"{i}.{key}", own, key) for i, own in states for key, value in own.items() if type(value) in _NUMBERS]

    # -- checkpoints ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint says of it, beside the note."""
        names = ("initial", "returns", "halvings", "noted_at", "noted_rise", "returned_at", "numbers")
        return {name: getattr(self, name) for name in names}

    def save(self, folder: Path, rank: int) -> None:
        """Write the note of this process."""
        whole = {name: value.contiguous() for name, value in self._note.items()}
        save_file(whole, folder / NOTE_FILE.format(rank=rank))

    def restart(self, checkpoint: str | None, known: Mapping[str, Any], rank: int, *, new_model: bool) -> None:
        """Before training: begin anew, or take what a checkpoint holds.

        A second training of one model is measured by what was before the first, but not where a ``new_model`` is made.
        """
        if checkpoint is None and self._step is not None and not new_model:  # the optimizer stays
            scale_learning_rate(self._step.optimizer, 2.0**self.halvings)
        self._step, self._note, self.numbers = None, {}, {}
        self.returns = self.halvings = self.noted_at = self.returned_at = self._looked_at = 0
        if checkpoint is not None:
            self._note = load_file(part_of(checkpoint, NOTE_FILE.format(rank=rank), "a budget"))
            for name in self.state().keys() & known.keys():
                setattr(self, name, known[name])
            if self.noted_rise > (budget := float(self._settings.budget or 0.0)):
                raise ConfigError(
                    f"budget={budget} is exceeded by what {checkpoint} would go back to: at step {self.noted_at} "
                    f"{self._told(self.noted_rise)}. Raise the budget, or start anew with this one."
                )
        elif new_model:
            self.initial = None


def check_budget_data(samples: Any) -> None:
    """Raise if there is too little to measure the budget on."""
    count = 0 if samples is None else len(samples)
    if count < 2:
        raise DataError(
            f"budget needs samples that take no part in training, and {count or 'none'} were given: pass "
            "budget_dataset=… with at least 2, better 50."
        )


def scale_learning_rate(optimizer: torch.optim.Optimizer, factor: float, scheduler: Any = None) -> None:
    """From the next step on, whatever the schedule."""
    for group in optimizer.param_groups:
        group["lr"] *= factor
        if "initial_lr" in group:
            group["initial_lr"] *= factor
    scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate's wrapper
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [factor * rate for rate in scheduler.base_lrs]
