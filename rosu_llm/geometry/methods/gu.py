"""GU, geometric-disentanglement unlearning: forget outside the retain span, repair inside it (Zhou et al., 2026).

The paper's form (App. on setup, H = I) moves w by +ρ(P_{Q⊥} f − P_T r), with Q an orthonormal basis of k sampled
per-sample retain gradients and P_T = Q Qᵀ. As a descent gradient, with the learning rate in place of ρ:

    v = P_T r − (I − P_T) f.

With ``metric="adam"`` the projectors are orthogonal in ⟨x, D⁻¹ y⟩, D = √v̂ + ε: then what the optimizer makes of the
forget part, D⁻¹(I − P_T) f, is neutral for every sampled retain gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..gram import Gram
from ..subspace import Protection, Subspace
from ..vector import F, R, Vector
from .base import Inner
from .descent import Descent
from .rosu_subspace import check_metric


@dataclass(frozen=True)
class GU(Descent):
    """v = P_T r − (I − P_T) f."""

    protection: Protection = field(default_factory=lambda: Protection(8, mean=False))
    metric: str = "euclidean"

    def __post_init__(self) -> None:
        check_metric(self.metric)

    @property
    def samples(self) -> int:  # type: ignore[override]
        return self.protection.samples

    def protected(self, gram: Gram) -> Subspace:
        return self.protection.span(gram.dual or gram)

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        span = self.protected(gram)
        return span.project(R) - span.without(F)
