"""End with the weights that came closest to the targets, instead of those of the last step.

Every so many steps the losses of all forget samples are compared with their targets. The weights with the smallest mean
distance are noted in host memory, travel with the checkpoints, and are put back when training ends. With a budget the
run has gone back before it is looked at, so what is noted is inside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback

from ..files import part_of
from ..step import UnlearningStep

logger = logging.getLogger(__name__)

#: One file for each process that holds a part of its own.
BEST_FILE = "rosu_best_{rank}.safetensors"


class Best(TrainerCallback):
    """Watches one run.

    Args:
        every: steps between looks.
        measure: mean |T − ℓ| over the forget samples under the weights the model has now.
        log: takes values to be logged.
    """

    def __init__(self, every: int, measure: Callable[[], float], log: Callable[[Mapping[str, float]], None]) -> None:
        self._every, self._measure, self._log = every, measure, log
        self._step: UnlearningStep | None = None
        self._weights: list[Tensor] = []
        self.distance = inf
        self.noted_at = 0
        self._looked_at = 0

    def begin(self, step: UnlearningStep) -> None:
        """Before the first step of a run or of its continuation."""
        if self._step is step:
            return
        self._step = step
        if not self._weights:
            self._look(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look if it is due."""
        if self._step is not None and state.global_step % self._every == 0:
            self._look(state.global_step)

    @torch.no_grad()
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the noted weights back."""
        if self._step is None:
            return
        if self._looked_at != state.global_step:
            self._look(state.global_step)
        for weight, noted in zip(self._step.space.weights(), self._weights, strict=True):
            weight.copy_(noted)
        self._step.space.weights_changed()
        logger.info("keep_best: step %d, %.4f from the targets", self.noted_at, self.distance)

    def _look(self, at: int) -> None:
        assert self._step is not None
        distance, self._looked_at = self._measure(), at
        if at:
            self._log({"depth/distance": distance})
        if not self._weights or distance < self.distance:
            self._weights = [weight.detach().to("cpu", copy=True) for weight in self._step.space.weights()]
            self.distance, self.noted_at = distance, at

    # -- checkpoints ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint says of it, beside the weights."""
        return {"distance": self.distance, "noted_at": self.noted_at}

    def save(self, folder: Path, rank: int) -> None:
        """Write the noted weights of this process."""
        save_file({str(i): w.contiguous() for i, w in enumerate(self._weights)}, folder / BEST_FILE.format(rank=rank))

    def restart(self, checkpoint: str | None, known: Mapping[str, Any], rank: int) -> None:
        """Before training: begin anew, or take what a checkpoint holds."""
        self._step, self._weights, self.distance, self.noted_at = None, [], inf, 0
        if checkpoint is not None:
            found = load_file(part_of(checkpoint, BEST_FILE.format(rank=rank), "keep_best='depth'"))
            self._weights = [found[str(i)] for i in range(len(found))]
            self.distance, self.noted_at = known["distance"], known["noted_at"]
