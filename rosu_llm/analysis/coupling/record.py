"""What is measured on one forget/retain pair, and what follows from it.

Along a unit direction u the retain loss is L_r(w+ρu) = L_r(w) + ρ⟨r,u⟩ + R(ρ); R is the second-order part. The
standard perturbation has u = f/‖f‖ and ⟨r,u⟩ = ‖r‖cos θ, the retain-neutral one u = q/‖q‖ and ⟨r,u⟩ = 0 (up to τ).
The advantage of the latter, L_r(w+δ_std) − L_r(w+δ_rosu), is guaranteed to be positive while cos θ > M_r ρ/‖r‖
(Corollary 1), where M_r bounds the curvature along both. As measured, it lasts until the two loss curves cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Ray:
    """Both losses along one unit direction u.

    Attributes:
        retain_slope: ⟨r, u⟩.
        forget_slope: ⟨f, u⟩.
        retain: L_r(w+ρu) − L_r(w) at each measured ρ.
        forget: L_f(w+ρu) − L_f(w) at each measured ρ.
        curvature: uᵀ∇²L_r(w)u by a central difference.
        realized: the smallest share of ρu that survived rounding of the weights.
    """

    retain_slope: float
    forget_slope: float
    retain: tuple[float, ...]
    forget: tuple[float, ...]
    curvature: float
    realized: float = 1.0


#: The figures of a pair at the weights as they are, in the order of the result.
FIGURES = (
    *("cosine", "sine", "forget_norm", "retain_norm", "retain_square", "q_norm"),
    *("residue", "forget_loss", "retain_loss"),
)


@dataclass(frozen=True, eq=False)
class PairRecord:
    """Everything measured on one pair.

    Attributes:
        pair: its number, from 1.
        rhos: the measured radii, ascending.
        residue: τ/(‖r‖²+τ), the share of the retain component that τ leaves in q.
        resolution: smaller changes of the retain loss are rounding errors.
        products: ‖f‖², ⟨f, r⟩ and ‖r‖² of each part of the model.
        standard, neutral: the losses along δ_std and δ_rosu; None where the direction vanishes (fallback).
    """

    pair: int
    rhos: Sequence[float]
    cosine: float
    sine: float
    forget_norm: float
    retain_norm: float
    retain_square: float
    q_norm: float
    residue: float
    forget_loss: float
    retain_loss: float
    resolution: float
    products: NDArray[np.float64]
    standard: Ray | None
    neutral: Ray | None

    @property
    def fallback(self) -> bool:
        """Whether a training step on this pair would be plain retain descent."""
        return self.neutral is None

    @property
    def rays(self) -> tuple[Ray, Ray] | None:
        """The standard and the neutral ray, where both exist."""
        return None if self.standard is None or self.neutral is None else (self.standard, self.neutral)

    @cached_property
    def curvature_bounds(self) -> list[float]:
        """M_r(ρ) = max 2|R(t)|/t² over measured t ≤ ρ and both directions, for each ρ; rises with ρ.

        Estimates the bound of Assumption 1 from the two measured segments. Where R is no larger than rounding errors it
        says nothing about curvature and is ignored.
        """
        bounds, highest = [], 0.0
        for at, rho in enumerate(self.rhos):
            rest = max((abs(ray.retain[at] - ray.retain_slope * rho) for ray in self.rays or ()), default=0.0)
            if rest > self.resolution:
                highest = max(highest, 2.0 * rest / rho**2)
            bounds.append(highest)
        return bounds

    @property
    def guaranteed_radius(self) -> float | None:
        """ρ*: the smallest ρ at which cos θ > M_r(ρ)ρ/‖r‖ fails; None where cos θ ≤ 0 or a direction vanishes.

        Beyond the last measured ρ it is extrapolated with the largest curvature seen; infinite where none was seen.
        """
        if self.cosine <= 0.0 or self.rays is None:
            return None
        slope, before = self.retain_norm * self.cosine, 0.0
        for rho, bound in zip(self.rhos, self.curvature_bounds, strict=True):
            if bound * rho >= slope:
                return max(before, slope / bound)
            before = rho
        return slope / bound if bound > 0.0 else inf

    @property
    def gaps(self) -> list[float]:
        """L_r(w+δ_std) − L_r(w+δ_rosu) at each measured ρ."""
        return [] if self.rays is None else [a - b for a, b in zip(*(ray.retain for ray in self.rays), strict=True)]

    @property
    def gap_slope(self) -> float:
        """The slope of that difference at ρ = 0."""
        return 0.0 if self.rays is None else self.rays[0].retain_slope - self.rays[1].retain_slope

    @property
    def crossing(self) -> float | None:
        """Where the gap ends; None also where cos θ ≤ 0, so that there is no advantage to lose."""
        return crossing(self.gaps, self.gap_slope, self.rhos) if self.cosine > 0.0 else None


def crossing(gaps: Sequence[float], slope: float, rhos: Sequence[float]) -> float | None:
    """Where the measured advantage ends: the first ρ with gap ≤ 0; None where it does not end, or never began.

    Between two measured radii gap/ρ is taken as linear, which is exact for quadratic losses; ``slope`` is its value
    at ρ → 0.
    """
    if slope <= 0.0:
        return None
    before, height = 0.0, slope
    for rho, gap in zip(rhos, gaps, strict=True):
        if gap <= 0.0:
            return before + (rho - before) * height / (height - gap / rho)
        before, height = rho, gap / rho
    return None
