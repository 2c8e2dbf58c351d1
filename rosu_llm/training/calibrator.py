"""Measures the loss of unseen data and turns it into a factor on the pull."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..losses import COUNT, logits_of, token_nll
from ..step.calibration import pull_scale


class Calibrator:
    """clip((L_target − L_forget)/margin, 0, 1), with L_target a number or the held-out loss.

    Args:
        target: fixed target loss, or None to measure it on ``holdout``.
        margin: loss gap at which the pull is full.
        every: steps between measurements of the held-out loss.
        holdout: returns the held-out batches, on the model's device.
        forward_context: entered around every forward (autocast).
        mean_over_ranks: averages a small tensor over processes, so that replicas agree to the bit.
    """

    def __init__(
        self,
        *,
        target: float | None,
        margin: float,
        every: int,
        holdout: Callable[[], Iterable[Mapping[str, Any]]],
        forward_context: Callable[[], AbstractContextManager[Any]],
        mean_over_ranks: Callable[[Tensor], Tensor],
    ) -> None:
        self._fixed, self._margin, self._every = target, margin, every
        self._holdout, self._context, self._mean = holdout, forward_context, mean_over_ranks
        self.target = target

    def refresh(self, model: nn.Module, step: int) -> None:
        """Measure the held-out loss if it is due at this step."""
        if self._fixed is None and (self.target is None or step % self._every == 0):
            self.target = self.mean_nll(model, self._holdout())

    @torch.no_grad()
    def mean_nll(self, model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> float:
        """Mean answer-token NLL over all batches and ranks, without dropout."""
        total, count = 0.0, 0.0
        training = model.training
        model.eval()
        try:
            for batch in batches:
                with self._context():
                    total += float(token_nll(logits_of(model, batch), batch["labels"]).double().sum())
                count += float(COUNT["token"](batch))
        finally:
            model.train(training)
        summed, counted = self._mean(torch.tensor([total, count], dtype=torch.float64)).tolist()
        return float(summed / counted) if counted else float("nan")

    def scale(self, forget_loss: float) -> float:
        """The factor on β for this step."""
        return pull_scale(float("nan") if self.target is None else self.target, forget_loss, self._margin)
