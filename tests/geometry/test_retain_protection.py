"""Theorem 1 and Corollary 1 on quadratic retain losses, whose smoothness constant M_r = ‖H‖ is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rosu_llm.geometry import BaseRule, build_rule

from .problems import (
    EPS,
    Dense,
    Pair,
    Quadratic,
    at_cosine,
    bounded,
    dense,
    exact_rosu,
    gram_of,
    inner,
    norm,
    radii,
    seeds,
    symmetric,
)


@dataclass(frozen=True)
class Scene:
    """A point w, a pair of gradients there, and a quadratic retain loss whose gradient at w is r."""

    w: Dense
    pair: Pair
    loss: Quadratic

    def damage(self, delta: Dense) -> float:
        """L_r(w + δ) − L_r(w)."""
        return self.loss(self.w + delta) - self.loss(self.w)

    def perturbation(self, rule: BaseRule, rho: float) -> Dense:
        return dense(rule.inner(gram_of(self.pair.vectors), rho).delta, self.pair.vectors)

    def rounding(self, rho: float) -> float:
        """float64 error of `damage`: a few dozen roundings of the largest terms of the loss."""
        reach = norm(self.w) + rho
        return 100 * EPS * reach * (self.loss.smoothness * reach + norm(self.loss.linear)) / self.pair.sine


def scene(seed: int, cosine: float, hessian: Dense | None = None, dim: int = 5, r_norm: float = 1.7) -> Scene:
    """A scene at the given cos θ; random symmetric curvature unless a Hessian is given."""
    rng = np.random.default_rng([2, seed])
    p = at_cosine(cosine, seed, dim, f_norm=0.8, r_norm=r_norm)
    w = rng.normal(size=dim)
    return Scene(w, p, Quadratic.with_gradient(symmetric(dim, rng) if hessian is None else hessian, w, p.r))


ROSU, STANDARD = exact_rosu(), build_rule("minmax")
scenes = st.builds(scene, seeds, st.floats(-0.999, 0.999))


@bounded
@given(scenes, radii)
def test_retain_damage_is_at_most_half_m_rho_squared(x: Scene, rho: float) -> None:
    """L_r(w + δ_rosu) ≤ L_r(w) + ½M_rρ², at every angle (Theorem 1 (i))."""
    damage = x.damage(x.perturbation(ROSU, rho))
    assert damage <= 0.5 * x.loss.smoothness * rho**2 + x.rounding(rho)


@bounded
@given(seeds, st.floats(-0.999, 0.999), radii, st.floats(0.1, 10.0))
def test_bound_is_attained_by_isotropic_curvature(seed: int, cosine: float, rho: float, curvature: float) -> None:
    """With H = M·I the bound is an equality: the full radius is used and nothing of first order is left."""
    x = scene(seed, cosine, curvature * np.eye(5))
    damage = x.damage(x.perturbation(ROSU, rho))
    assert abs(damage - 0.5 * curvature * rho**2) <= x.rounding(rho)


@bounded
@given(scenes, radii)
def test_retain_damage_is_curvature_alone(x: Scene, rho: float) -> None:
    """L_r(w + δ_rosu) − L_r(w) = ½δᵀHδ: the first-order term is gone (proof of Theorem 1 (i))."""
    delta = x.perturbation(ROSU, rho)
    assert abs(x.damage(delta) - 0.5 * inner(delta, x.loss.hessian @ delta)) <= x.rounding(rho)


@pytest.mark.parametrize("seed", range(10))
def test_retain_damage_scales_quadratically_with_the_radius(seed: int) -> None:
    """damage(ρ)/ρ² is constant over four orders of ρ for ROSU (text after Theorem 1)."""
    x = scene(seed, cosine=0.7)
    expected = x.damage(x.perturbation(ROSU, 1.0))
    for rho in (1e-2, 1e-1, 10.0, 100.0):
        damage = x.damage(x.perturbation(ROSU, rho))
        assert abs(damage - expected * rho**2) <= x.rounding(rho) + x.rounding(1.0) * rho**2


@pytest.mark.parametrize("seed", range(10))
def test_standard_damage_scales_linearly_with_the_radius(seed: int) -> None:
    """damage(ρ)/ρ → ‖r‖cos θ for the standard perturbation: the contrast to the test above (§2.1)."""
    x = scene(seed, cosine=0.7)
    for rho in (1e-3, 1e-4):
        slope = x.damage(x.perturbation(STANDARD, rho)) / rho
        # The second-order term is at most ½Mρ; the rounding of the loss is divided by ρ.
        allowed = 0.5 * x.loss.smoothness * rho + x.rounding(rho) / rho
        assert abs(slope - norm(x.pair.r) * 0.7) <= allowed


@bounded
@given(scenes, radii)
def test_gap_to_the_standard_perturbation(x: Scene, rho: float) -> None:
    """L_r(w + δ_std) − L_r(w + δ_rosu) ≥ ρ‖r‖cos θ − M_rρ² (Theorem 1 (ii))."""
    gap = x.damage(x.perturbation(STANDARD, rho)) - x.damage(x.perturbation(ROSU, rho))
    bound = rho * norm(x.pair.r) * x.pair.cosine - x.loss.smoothness * rho**2
    assert gap >= bound - 2.0 * x.rounding(rho)


@bounded
@given(seeds, st.floats(0.05, 0.999), st.floats(0.05, 0.9))
def test_strict_improvement_under_positive_alignment(seed: int, cosine: float, share: float) -> None:
    """cos θ > M_rρ/‖r‖ implies L_r(w + δ_std) > L_r(w + δ_rosu) (Corollary 1)."""
    x = scene(seed, cosine)
    rho = share * cosine * norm(x.pair.r) / x.loss.smoothness
    assert x.pair.cosine > x.loss.smoothness * rho / norm(x.pair.r)
    assert x.loss(x.w + x.perturbation(STANDARD, rho)) > x.loss(x.w + x.perturbation(ROSU, rho))


@bounded
@given(seeds, st.floats(-0.999, -0.05), st.floats(0.05, 0.9))
def test_no_improvement_is_claimed_under_negative_alignment(seed: int, cosine: float, share: float) -> None:
    """cos θ < 0 and small ρ: the standard perturbation does better on L_r; ROSU is cautious (Remark 1)."""
    x = scene(seed, cosine)
    rho = share * -cosine * norm(x.pair.r) / x.loss.smoothness
    assert x.damage(x.perturbation(STANDARD, rho)) < x.damage(x.perturbation(ROSU, rho))
