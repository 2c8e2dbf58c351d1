"""Measure where training would begin, with model, losses, precision and layout as training would have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from transformers import TrainerCallback

from ..training.trainer import ROSUMixin

T = TypeVar("T")


def instead_of_training(trainer: ROSUMixin, action: Callable[[], T]) -> T:
    """Let the trainer spread the model, then run ``action`` in place of its first step; no step is ever taken."""
    trainer.add_callback(_Instead(action))
    try:
        trainer.train()
    except _Done as done:
        result: T = done.result
        return result
    raise AssertionError("the training loop did not begin")


class _Done(Exception):
    """Leaves the training loop before its first step."""

    def __init__(self, result: Any) -> None:
        super().__init__("done")
        self.result = result


class _Instead(TrainerCallback):
    def __init__(self, action: Callable[[], Any]) -> None:
        self._action = action

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise _Done(self._action())
