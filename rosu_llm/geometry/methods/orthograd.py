"""OrthoGrad: forget orthogonally to the gradient of each retain sample (Shamsian et al., 2025; paper, App. on setup).

v = α r − (1 − α) f_⊥ with f_⊥ = f − Q Qᵀ f and Q an orthonormal basis of k sampled per-sample retain gradients. Where
PCGrad protects the mean retain gradient, whose per-sample parts may cancel, this protects each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...errors import ConfigError
from ..gram import Gram
from ..subspace import Protection, Subspace
from ..vector import F, R, Vector
from .base import Inner
from .descent import Descent


@dataclass(frozen=True)
class OrthoGrad(Descent):
    """v = α r − (1 − α)(f − Q Qᵀ f)."""

    protection: Protection = field(default_factory=lambda: Protection(8, mean=False))
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"orthograd_alpha={self.alpha!r} must lie between 0 (forget only) and 1 (retain only).")

    @property
    def samples(self) -> int:  # type: ignore[override]
        return self.protection.samples

    def protected(self, gram: Gram) -> Subspace:
        return self.protection.span(gram)

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        return self.alpha * R - (1.0 - self.alpha) * self.protected(gram).without(F)
