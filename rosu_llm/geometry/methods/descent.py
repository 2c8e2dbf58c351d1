"""Methods without a surrogate point: one combination of the gradients at w.

`GradDiff` raises the forget loss and lowers the retain loss at once: v = λ_r r − λ_f f. With the NPO
or SimNPO forget loss it is those methods. `FineTune` keeps only the retain part, `NegativeGradient`
only the forget part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import ConfigError
from ..gram import Gram
from ..vector import F, R, Vector
from .base import Inner, Simple


class Descent(Simple):
    """A rule without a surrogate point."""

    passes: tuple[str, ...] = ("forget", "retain")
    perturbs = False
    pulls = False
    surrogate = "retain"
    curves = False

    def inner(self, gram: Gram, rho: float) -> Inner:
        raise TypeError(f"{type(self).__name__} has no surrogate point")

    def curvature(self, gram: Gram, inner: Inner) -> Mapping[str, Vector]:
        return {}


@dataclass(frozen=True)
class Weighted(Descent):
    """A rule with a weight for each gradient, λ_f and λ_r."""

    forget_weight: float = 1.0
    retain_weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("forget_weight", "retain_weight"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a number ≥ 0.")


@dataclass(frozen=True)
class GradDiff(Weighted):
    """v = λ_r r − λ_f f."""

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        return self.retain_weight * R - self.forget_weight * F


@dataclass(frozen=True)
class FineTune(Descent):
    """v = r: retain descent alone."""

    passes = ("retain",)

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        return R


@dataclass(frozen=True)
class NegativeGradient(Descent):
    """v = −f: forget ascent alone."""

    passes = ("forget",)

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        return -F
