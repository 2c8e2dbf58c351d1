"""Standard min–max unlearning: perturb along the forget gradient itself, δ_std = ρ f/‖f‖ (paper, eq. 3).

The perturbation is free to raise the retain loss: to first order by ρ‖r‖cos θ. `MinMax` is ROSU with
nothing but the projection removed, the fair control for it. `Uam` is the form released with
Unlearning-Aware Minimization: the gradient at the surrogate point and no amplification; `UamRelaxed` carries it back
to w by the identity-Hessian Jacobian, `UamReflected` turns around its component along f.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from ...errors import ConfigError, unknown
from ..gram import Gram
from ..vector import F, R, S, Vector
from .base import Inner, Simple
from .rosu import check_threshold

JACOBIANS = ("relaxed", "none")


@dataclass(frozen=True)
class MinMax(Simple):
    """δ = ρ f/‖f‖; v = s + (ρ/‖f‖)(I − P_f) s (``relaxed``) or s (``none``); amplified along δ."""

    jacobian: str = "relaxed"
    eps_q: float = 1e-6

    perturbs = True
    pulls = True
    surrogate = "retain"
    curves = False

    def __post_init__(self) -> None:
        if self.jacobian not in JACOBIANS:
            raise unknown("jacobian", self.jacobian, JACOBIANS)
        check_threshold(self.eps_q)

    @property
    def passes(self) -> tuple[str, ...]:
        # The retain gradient at w is not part of the rule; it is captured for the fallback and so
        # that coupling and leak are reported on the same footing as for ROSU.
        return ("forget", "retain")

    def inner(self, gram: Gram, rho: float) -> Inner:
        f_norm = gram.norm(F)
        if f_norm <= self.eps_q:
            return Inner(Vector(), f_norm, alpha=0.0, fallback=True)
        alpha = rho / f_norm
        return Inner(alpha * F, f_norm, alpha)

    def curvature(self, gram: Gram, inner: Inner) -> Mapping[str, Vector]:
        return {}

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        if inner is None or inner.fallback:
            return R
        if self.jacobian == "none":
            return S
        c = gram(F, S) / gram(F, F)
        return S + inner.alpha * (S - c * F)


@dataclass(frozen=True)
class Uam(MinMax):
    """δ = ρ f/‖f‖, gradient s, no amplification."""

    jacobian: str = "none"

    pulls = False


@dataclass(frozen=True)
class UamRelaxed(MinMax):
    """δ = ρ f/‖f‖, gradient s + (ρ/‖f‖)(I − P_f) s, no amplification."""

    pulls = False


@dataclass(frozen=True)
class UamReflected(Uam):
    """δ = ρ f/‖f‖, gradient s − γ⟨s,f⟩ f/‖f‖²: γ = 1 removes the component along f, γ = 2 reflects it."""

    reflection: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.reflection >= 0.0 and isfinite(self.reflection)):
            raise ConfigError(f"reflection={self.reflection!r} must be a number ≥ 0, e.g. 2.")

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        if inner is None or inner.fallback:
            return R
        return S - (self.reflection * gram(F, S) / gram(F, F)) * F
