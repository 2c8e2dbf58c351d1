"""The loss of data that is not trained on, for the calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..losses import COUNT, logits_of, token_nll


@torch.no_grad()
def mean_nll(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    forward_context: Callable[[], AbstractContextManager[Any]],
    mean_over_ranks: Callable[[Tensor], Tensor],
) -> float:
    """Mean answer-token NLL over all batches and ranks, without dropout; NaN where there is no answer token.

    Args:
        forward_context: entered around every forward (autocast).
        mean_over_ranks: averages a small tensor over processes, so that replicas agree to the bit.
    """
    total, count = 0.0, 0.0
    training = model.training
    model.eval()
    try:
        for batch in batches:
            with forward_context():
                total += float(token_nll(logits_of(model, batch), batch["labels"]).double().sum())
            count += float(COUNT["token"](batch))
    finally:
        model.train(training)
    summed, counted = mean_over_ranks(torch.tensor([total, count], dtype=torch.float64)).tolist()
    return float(summed / counted) if counted else float("nan")
