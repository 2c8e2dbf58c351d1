"""Sharpness-aware forgetting: flatten the forget objective so that relearning is hard (Fan et al., 2025).

The forget objective that is *minimised* is −L_f; its worst case within ρ lies at δ = −ρ f/‖f‖. The forget gradient is
taken there, the retain gradient at w: v = λ_r r − λ_f s with s = ∇L_f(w+δ). With ``forget_loss: npo`` this is NPO+SAM.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..gram import Gram
from ..vector import F, R, S, Vector
from .base import Inner, Surrogate, Weighted


@dataclass(frozen=True, kw_only=True)
class SharpnessAware(Surrogate, Weighted):
    """v = λ_r r − λ_f ∇L_f(w − ρ f/‖f‖)."""

    surrogate = "forget"

    def inner(self, gram: Gram, rho: float) -> Inner:
        norm = gram.norm(F)
        if norm <= self.eps_q:
            return Inner.fall_back(norm)
        return Inner((-rho / norm) * F, norm, rho / norm)

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        at = F if inner is None or inner.fallback else S
        return self.retain_weight * R - self.forget_weight * at
