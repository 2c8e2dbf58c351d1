"""GU, geometric-disentanglement unlearning: forget outside the retain span, repair inside it (Zhou et al., 2026).

The paper's form (App. on setup, H = I) moves w by +ρ(P_{Q⊥} f − P_T r), with Q an orthonormal basis of k sampled
per-sample retain gradients and P_T = Q Qᵀ. As a descent gradient, with the learning rate in place of ρ:

    v = P_T r − (I − P_T) f.

With ``metric="adam"`` the projectors are orthogonal in ⟨x, D⁻¹ y⟩, D = √v̂ + ε: then what the optimizer makes of the
forget part, D⁻¹(I − P_T) f, is neutral for every sampled retain gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..gram import Gram
from ..vector import F, R, Vector
from .base import InMetric, Inner, Protecting


@dataclass(frozen=True, kw_only=True)
class GU(Protecting, InMetric):
    """v = P_T r − (I − P_T) f."""

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        span = self.protected(gram)
        return span.project(R) - span.without(F)
