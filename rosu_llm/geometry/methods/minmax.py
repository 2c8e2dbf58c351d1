"""Standard min–max unlearning: perturb along the forget gradient itself, δ_std = ρ f/‖f‖ (paper, eq. 3).

The perturbation is free to raise the retain loss: to first order by ρ‖r‖cos θ. `MinMax` is ROSU with
nothing but the projection removed, the fair control for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import unknown
from ..gram import Gram
from ..vector import F, R, S, Vector
from .base import Inner, Surrogate, option

JACOBIANS = ("relaxed", "none")


@dataclass(frozen=True, kw_only=True)
class MinMax(Surrogate):
    """δ = ρ f/‖f‖; v = s + (ρ/‖f‖)(I − P_f) s (``relaxed``) or s (``none``); amplified along δ."""

    jacobian: str = option("relaxed", "Outer gradient: relaxed, or none (v = s).")

    # The retain gradient at w is not part of the rule; it is captured for the fallback and so that coupling and leak
    # are reported on the same footing as for ROSU.
    passes = ("forget", "retain")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jacobian not in JACOBIANS:
            raise unknown("jacobian", self.jacobian, JACOBIANS)

    @property
    def pulls(self) -> bool:
        return True

    def inner(self, gram: Gram, rho: float) -> Inner:
        f_norm = gram.norm(F)
        if f_norm <= self.eps_q:
            return Inner.fall_back(f_norm)
        alpha = rho / f_norm
        return Inner(alpha * F, f_norm, alpha)

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        if inner is None or inner.fallback:
            return R
        if self.jacobian == "none":
            return S
        c = gram(F, S) / gram(F, F)
        return S + inner.alpha * (S - c * F)
