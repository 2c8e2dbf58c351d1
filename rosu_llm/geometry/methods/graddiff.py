"""Gradient difference: raise the forget loss and lower the retain loss at once. With `npo` or `simnpo` it is those."""

from __future__ import annotations

from dataclasses import dataclass

from ..gram import Gram
from ..vector import F, R, Vector
from .base import Inner, Weighted


@dataclass(frozen=True, kw_only=True)
class GradDiff(Weighted):
    """v = λ_r r − λ_f f."""

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        return self.retain_weight * R - self.forget_weight * F
