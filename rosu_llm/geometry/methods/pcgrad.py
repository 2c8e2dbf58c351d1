"""Projection at the outer update: PCGrad in its two forms, and BLUR.

They remove from one gradient what conflicts with the other and add the two up; there is no surrogate point, so what
the projection protects is the step itself, to first order.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..gram import Gram
from ..vector import F, R, Vector
from .base import Inner, Weighted


@dataclass(frozen=True, kw_only=True)
class PCGrad(Weighted):
    """v = λ_r r − λ_f q, q = f − ⟨f,r⟩/‖r‖² r: the paper's form, which always projects (App. B, λ_pc = λ_f)."""

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        return self.retain_weight * R - self.forget_weight * _without(F, R, gram)


@dataclass(frozen=True, kw_only=True)
class PCGradConflict(Weighted):
    """The original (Yu et al., 2020): the tasks −L_f and L_r project each other, and only where they conflict.

    −f and r conflict where ⟨f, r⟩ > 0; then v = λ_r (r − P_f r) − λ_f (f − P_r f), else v = λ_r r − λ_f f.
    """

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        if gram(F, R) <= 0.0:
            return self.retain_weight * R - self.forget_weight * F
        return self.retain_weight * _without(R, F, gram) - self.forget_weight * _without(F, R, gram)


@dataclass(frozen=True, kw_only=True)
class Blur(Weighted):
    """v = λ_r (r − P_f r) − λ_f f: forgetting comes first, and retention may use only what is orthogonal to it.

    The bi-level reading of unlearning (Reisizadeh et al., 2025).
    """

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        return self.retain_weight * _without(R, F, gram) - self.forget_weight * F


def _without(x: Vector, direction: Vector, gram: Gram) -> Vector:
    """x minus its component along ``direction``; x itself where that vanishes."""
    square = gram(direction, direction)
    return x - (gram(x, direction) / square) * direction if square > 0.0 else x
