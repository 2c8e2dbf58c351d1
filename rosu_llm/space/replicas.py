"""Replicas whose backward passes bypass the wrapper that would have averaged their gradients.

Passes that run only a part of the model do not go through DDP's forward, and DDP then averages nothing. Here the
gradient of a pass is averaged once, after its last micro-batch; every rank then holds the same one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from .local import LocalSpace


class ReplicaSpace(LocalSpace):
    """Whole tensors on every process, gradients averaged by this space.

    Args:
        parameters: the trained ones, in the same order on every rank.
        average: replaces a tensor by its mean over ranks, in place.
        scaler, compute_dtype: as for :class:`LocalSpace`.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        average: Callable[[Tensor], None],
        scaler: torch.amp.GradScaler | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(parameters, average=average, scaler=scaler, compute_dtype=compute_dtype)

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        yield
        if last:
            for p in self.parameters:
                if p.grad is None:  # every rank must join the collective
                    p.grad = torch.zeros_like(p)
                self._average(p.grad)
