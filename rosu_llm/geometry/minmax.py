"""Standard min–max unlearning: perturb along the forget gradient itself, δ_std = ρ f/‖f‖ (paper, eq. 3).

The perturbation is free to raise the retain loss: to first order by ρ‖r‖cos θ. `MinMax` is ROSU with
nothing but the projection removed, the fair control for it. `Uam` is the form released with
Unlearning-Aware Minimization: the gradient at the surrogate point and no amplification.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import unknown
from .gram import Gram
from .rosu import JACOBIANS, check_threshold
from .rule import Inner
from .vector import F, R, S, Vector


@dataclass(frozen=True)
class MinMax:
    """δ = ρ f/‖f‖; v = s + (ρ/‖f‖)(I − P_f) s (``relaxed``) or s (``none``); amplified along δ."""

    jacobian: str = "relaxed"
    eps_q: float = 1e-6

    perturbs = True
    pulls = True

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
