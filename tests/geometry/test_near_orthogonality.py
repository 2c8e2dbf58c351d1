"""Proposition 5: near orthogonality the ROSU and the standard perturbation are nearly the same."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rosu_llm.geometry import build_rule, coupling

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
    norm,
    radii,
    regular_pairs,
    seeds,
    symmetric,
)


def perturbations(p: Pair, rho: float) -> tuple[Dense, Dense]:
    """δ_rosu and δ_std."""
    gram = gram_of(p.vectors)
    rosu, standard = exact_rosu(), build_rule("minmax", eps_q=0.0)
    return dense(rosu.inner(gram, rho).delta, p.vectors), dense(standard.inner(gram, rho).delta, p.vectors)


@bounded
@given(regular_pairs, radii)
def test_distance_formula(p: Pair, rho: float) -> None:
    """‖δ_rosu − δ_std‖ = ρ√(2(1 − sin θ)) (Proposition 5)."""
    rosu, standard = perturbations(p, rho)
    # 1 − sin θ = cos²θ/(1 + sin θ), written so that it keeps its digits where cos θ is small.
    expected = rho * abs(p.cosine) * sqrt(2.0 / (1.0 + p.sine))
    assert abs(norm(rosu - standard) - expected) <= 16 * EPS * rho / p.sine  # error of δ_rosu


@bounded
@given(seeds, st.floats(-12.0, 0.0), st.sampled_from([-1.0, 1.0]), radii)
def test_distance_is_at_most_root_two_rho_epsilon(seed: int, exponent: float, sign: float, rho: float) -> None:
    """|cos θ| ≤ ε implies ‖δ_rosu − δ_std‖ ≤ √2 ρ ε, for ε from 10⁻¹² to 1 (Proposition 5)."""
    p = at_cosine(sign * 0.999 * 10.0**exponent, seed)
    rosu, standard = perturbations(p, rho)
    assert norm(rosu - standard) <= sqrt(2.0) * rho * 10.0**exponent + 16 * EPS * rho / p.sine  # as above


@bounded
@given(seeds, st.floats(-8.0, -0.1), radii)
def test_lipschitz_consequence(seed: int, exponent: float, rho: float) -> None:
    """|L_r(w + δ_rosu) − L_r(w + δ_std)| ≤ √2 G_r ρ ε (Proposition 5).

    For a quadratic, ‖∇L_r‖ is convex along the segment, so G_r is the larger of its values at the ends.
    """
    p = at_cosine(10.0**exponent, seed, r_norm=1.5)
    rng = np.random.default_rng([3, seed])
    w = rng.normal(size=p.r.size)
    loss = Quadratic.with_gradient(symmetric(p.r.size, rng), w, p.r)
    first, second = (w + delta for delta in perturbations(p, rho))
    lipschitz = max(norm(loss.gradient(first)), norm(loss.gradient(second)))
    gap = abs(loss(first) - loss(second))
    reach = norm(w) + rho
    # Rounding of the two losses themselves, as everywhere a loss difference is taken.
    rounding = 100 * EPS * reach * (loss.smoothness * reach + norm(loss.linear)) / p.sine
    assert gap <= sqrt(2.0) * lipschitz * rho * 10.0**exponent + rounding


@pytest.mark.parametrize("cosine", [0.9, 0.5, -0.5, 1e-2, -1e-3])
def test_reported_distance_is_the_distance(cosine: float) -> None:
    """`coupling` reports ‖δ_rosu − δ_std‖ without forming either (Proposition 5)."""
    p = at_cosine(cosine, seed=2, f_norm=3.0, r_norm=0.1)
    rosu, standard = perturbations(p, 0.4)
    # sin θ is rounded to EPS; through √(1 − sin θ) ≈ |cos θ|/√2 this becomes EPS/cos²θ relatively.
    assert coupling(gram_of(p.vectors), 0.4).distance == pytest.approx(norm(rosu - standard), rel=16 * EPS / cosine**2)


@pytest.mark.parametrize("cosine", [1e-8, 1e-9, 1e-10])
def test_reported_distance_keeps_its_digits_near_orthogonality(cosine: float) -> None:
    """`coupling` should report ρ|cos θ|√(2/(1 + sin θ)), which is ρ|cos θ| here, not 0 (Proposition 5)."""
    p = at_cosine(cosine, seed=2)
    # cos θ is built from unit vectors orthogonal to EPS, so it is known to EPS/cos θ.
    assert coupling(gram_of(p.vectors), 0.4).distance == pytest.approx(0.4 * cosine, rel=16 * EPS / cosine)
