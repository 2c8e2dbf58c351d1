"""Unlearning-Aware Minimization: the standard perturbation δ = ρ f/‖f‖ without amplification, in three forms.

`Uam` is the form released with the paper: the gradient at the surrogate point. `UamRelaxed` carries it back to w by the
identity-Hessian Jacobian, `UamReflected` turns around its component along f.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from ...errors import ConfigError
from ..gram import Gram
from ..vector import F, R, S, Vector
from .base import Inner, option
from .minmax import MinMax


@dataclass(frozen=True, kw_only=True)
class UamRelaxed(MinMax):
    """Gradient s + (ρ/‖f‖)(I − P_f) s."""

    # fixed by the form, hence no option
    jacobian: str = field(default="relaxed", init=False)

    @property
    def pulls(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class Uam(UamRelaxed):
    """Gradient s."""

    jacobian: str = field(default="none", init=False)


@dataclass(frozen=True, kw_only=True)
class UamReflected(Uam):
    """Gradient s − γ⟨s,f⟩ f/‖f‖²: γ = 1 removes the component along f, γ = 2 reflects it."""

    reflection: float = option(2.0, "uam_reflected: factor γ on the component along f.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.reflection >= 0.0 and isfinite(self.reflection)):
            raise ConfigError(f"reflection={self.reflection!r} must be a number ≥ 0, e.g. 2.")

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        if inner is None or inner.fallback:
            return R
        return S - (self.reflection * gram(F, S) / gram(F, F)) * F
