"""What the step engine asks of a parameter space, whatever layout the weights have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..geometry import Gram, Vector
from .preconditioner import Scales


@dataclass(frozen=True)
class Realized:
    """What became of a perturbation once weights were rounded to the type the model computes in.

    Attributes:
        norm: ‖δ‖ as intended.
        fraction: ⟨realised, δ⟩/‖δ‖²; 1 when all of δ arrived.
        distortion: ‖realised − δ‖/‖δ‖; 0 when nothing else did.
        leak: ⟨r, realised⟩, the first-order change of the retain loss.
    """

    norm: float
    fraction: float
    distortion: float
    leak: float


class ParameterSpace(Protocol):
    """Owner of weights and captured gradients. Layouts differ in where shards live and who sums scalars."""

    @property
    def is_perturbed(self) -> bool:
        """Whether the weights currently carry a perturbation."""

    def begin(self) -> None:
        """Forget the previous step's gradients and clear ``.grad``."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of one micro-batch; gradients are synchronised only on the last."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of ``loss``."""

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Let the optimizer step on the gradient written; False if it was skipped."""

    def capture(self, name: str) -> None:
        """Store the accumulated gradient under ``name`` and clear ``.grad``."""

    def hold(self, name: str) -> None:
        """Let ``name`` stand for the gradient accumulated in ``.grad``, without copying it."""

    def gram(self, names: Sequence[str], known: Gram | None = None, scales: Scales | None = None) -> Gram:
        """Inner products of the named gradients, over all shards; pairs in ``known`` are not recomputed.

        With ``scales`` those of the optimizer's metric, ⟨x, D⁻¹ y⟩.
        """

    def scales(self, optimizer: torch.optim.Optimizer) -> Scales | None:
        """D of the optimizer's metric as it is now; None before its first step."""

    def precondition(self, vector: Vector, scales: Scales, *, into: str) -> None:
        """Capture D⁻¹ times the given combination under ``into``."""

    def perturbed(self, delta: Vector, *, precise: bool, seed: int = 0) -> AbstractContextManager[Realized]:
        """The weights at w+δ; exactly w again on leaving, whatever happens inside."""

    def write_gradient(self, vector: Vector, *, precise: bool = False) -> None:
        """Make ``.grad`` the given combination, ready for the optimizer."""

    def discard_gradient(self) -> None:
        """Make the coming optimizer step one that the loss scaler skips."""

    def displacement(self) -> float:
        """‖w_now − w_before‖ since the perturbation's backup was taken."""

    def add(self, vector: Vector, *, precise: bool = False) -> None:
        """Move the weights by the given combination."""

    def hessian_product(self, closures: Sequence[Callable[[], Tensor]], vector: Vector, *, into: str) -> None:
        """Capture under ``into`` the Hessian of the closures' summed loss at w, times the given combination."""

    def release(self) -> None:
        """Give back the memory of captured gradients and backup."""
