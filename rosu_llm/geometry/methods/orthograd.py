"""OrthoGrad: forget orthogonally to the gradient of each retain sample (Shamsian et al., 2025; paper, App. on setup).

v = α r − (1 − α) f_⊥ with f_⊥ = f − Q Qᵀ f and Q an orthonormal basis of k sampled per-sample retain gradients. Where
PCGrad protects the mean retain gradient, whose per-sample parts may cancel, this protects each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError
from ..gram import Gram
from ..vector import F, R, Vector
from .base import Inner, Protecting, option


@dataclass(frozen=True, kw_only=True)
class OrthoGrad(Protecting):
    """v = α r − (1 − α)(f − Q Qᵀ f)."""

    orthograd_alpha: float = option(0.5, "orthograd: weight α of r; 1 − α on the forget part.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.orthograd_alpha <= 1.0:
            raise ConfigError(
                f"orthograd_alpha={self.orthograd_alpha!r} must lie between 0 (forget only) and 1 (retain only)."
            )

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        alpha = self.orthograd_alpha
        return alpha * R - (1.0 - alpha) * self.protected(gram).without(F)
