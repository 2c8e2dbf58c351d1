"""One forget/retain pair: gradients, and both losses along the two perturbations.

Along a unit direction u the retain loss is L_r(w+ρu) = L_r(w) + ρ⟨r,u⟩ + R(ρ); R is the second-order part. The
standard perturbation has u = f/‖f‖ and ⟨r,u⟩ = ‖r‖cos θ, the retain-neutral one u = q/‖q‖ and ⟨r,u⟩ = 0 (up to τ).
Its advantage L_r(w+δ_std) − L_r(w+δ_rosu) is positive for sure while cos θ > M_r ρ/‖r‖ (Corollary 1), M_r bounding the
curvature along both; and it is positive in fact until the two measured curves cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


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


@dataclass(frozen=True)
class PairRecord:
    """Everything measured on one pair.

    Attributes:
        pair: its number, from 1.
        residue: τ/(‖r‖²+τ), the share of the retain component that τ leaves in q.
        resolution: changes of the retain loss below this are rounding.
        standard, neutral: the losses along δ_std and δ_rosu; None where the direction vanishes (fallback).
    """

    pair: int
    forget_loss: float
    retain_loss: float
    cosine: float
    sine: float
    forget_norm: float
    retain_norm: float
    retain_square: float
    q_norm: float
    residue: float
    resolution: float
    standard: Ray | None
    neutral: Ray | None

    @property
    def fallback(self) -> bool:
        """Whether a training step on this pair would be plain retain descent."""
        return self.neutral is None

    def rays(self) -> tuple[Ray, Ray] | None:
        """Both rays, where both exist."""
        return None if self.standard is None or self.neutral is None else (self.standard, self.neutral)


def second_order(changes: Sequence[float], slope: float, rhos: Sequence[float]) -> list[float]:
    """R(ρ): realised change minus first-order change."""
    return [change - slope * rho for change, rho in zip(changes, rhos, strict=True)]


def curvature_bounds(record: PairRecord, rhos: Sequence[float]) -> list[float]:
    """M_r(ρ) = max 2|R(t)|/t² over measured t ≤ ρ and both directions, for each ρ; rises with ρ.

    Estimates the bound of Assumption 1 from what the two segments show. Where R is within rounding it says nothing
    about curvature and is passed over.
    """
    rays = record.rays()
    if rays is None:
        return [0.0] * len(rhos)
    parts = [second_order(ray.retain, ray.retain_slope, rhos) for ray in rays]
    bounds, highest = [], 0.0
    for rho, *rest in zip(rhos, *parts, strict=True):
        seen = max(abs(value) for value in rest)
        if seen > record.resolution:
            highest = max(highest, 2.0 * seen / rho**2)
        bounds.append(highest)
    return bounds


def guaranteed_radius(record: PairRecord, rhos: Sequence[float]) -> float | None:
    """ρ*: the smallest ρ at which cos θ > M_r(ρ)ρ/‖r‖ no longer holds; None where cos θ ≤ 0 or a direction vanishes.

    Beyond the last measured ρ it is extrapolated with the largest curvature seen; infinite where none was seen.
    """
    if record.cosine <= 0.0 or record.rays() is None:
        return None
    slope, before = record.retain_norm * record.cosine, 0.0
    bounds = curvature_bounds(record, rhos)
    for rho, bound in zip(rhos, bounds, strict=True):
        if bound * rho >= slope:
            return max(before, slope / bound)
        before = rho
    return slope / bounds[-1] if bounds[-1] > 0.0 else inf


def retain_gaps(record: PairRecord) -> list[float]:
    """L_r(w+δ_std) − L_r(w+δ_rosu) at each measured ρ."""
    rays = record.rays()
    return [] if rays is None else [a - b for a, b in zip(rays[0].retain, rays[1].retain, strict=True)]


def crossing(gaps: Sequence[float], slope: float, rhos: Sequence[float]) -> float | None:
    """Where the measured advantage ends: the first ρ with gap ≤ 0; None where it does not, or never began.

    Between two measured radii gap/ρ is taken as linear, which is exact for quadratic losses; ``slope`` is its value
    at ρ → 0.
    """
    if slope <= 0.0:
        return None
    before, height = 0.0, slope
    for rho, gap in zip(rhos, gaps, strict=True):
        if gap <= 0.0:
            now = gap / rho
            return before + (rho - before) * height / (height - now)
        before, height = rho, gap / rho
    return None
