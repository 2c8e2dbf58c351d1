"""Methods without a surrogate point: gradient difference, and each of its two gradients alone.

`GradDiff` raises the forget loss and lowers the retain loss at once; with the forget loss `npo` or `simnpo` it is those
methods. `FineTune` (``ft``) keeps only the retain part, `NegativeGradient` (``ng``) only the forget part.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..gram import Gram
from ..vector import F, R, Vector
from .base import BaseRule, Inner, Weighted


@dataclass(frozen=True, kw_only=True)
class GradDiff(Weighted):
    """v = λ_r r − λ_f f."""

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        return self.retain_weight * R - self.forget_weight * F


@dataclass(frozen=True)
class FineTune(BaseRule):
    """v = r: retain descent alone."""

    passes = ("retain",)

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        return R


@dataclass(frozen=True)
class NegativeGradient(BaseRule):
    """v = −f: forget ascent alone."""

    passes = ("forget",)

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        return -F
