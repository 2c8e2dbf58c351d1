"""Proposition 1: δ = ρ q/‖q‖ is the unique maximiser of ⟨f, δ⟩ over ‖δ‖ ≤ ρ, ⟨r, δ⟩ = 0."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from rosu_llm.geometry import F, R

from .problems import (
    EPS,
    REGULAR,
    Pair,
    bounded,
    dense,
    exact_rosu,
    feasible_directions,
    gram_of,
    inner,
    norm,
    pair,
    radii,
    regular_pairs,
    seeds,
)


@bounded
@given(regular_pairs, radii)
def test_perturbation_is_the_closed_form(p: Pair, rho: float) -> None:
    """δ = ρ q/‖q‖ with q = (I − P_r) f, for f and r at any two scales (Proposition 1)."""
    answer = exact_rosu().inner(gram_of(p.vectors), rho)
    delta = dense(answer.delta, p.vectors)
    # δ is formed from terms of size ρ/sin θ.
    assert norm(delta - rho * p.q / norm(p.q)) <= 16 * EPS * rho / p.sine
    assert answer.direction_norm == pytest.approx(norm(p.q), rel=16 * EPS / p.sine)
    assert answer.alpha == pytest.approx(rho / norm(p.q), rel=16 * EPS / p.sine)
    assert not answer.fallback


@bounded
@given(regular_pairs, radii)
def test_perturbation_spends_the_whole_budget(p: Pair, rho: float) -> None:
    """‖δ‖ = ρ (Proposition 1)."""
    delta = dense(exact_rosu().inner(gram_of(p.vectors), rho).delta, p.vectors)
    assert norm(delta) == pytest.approx(rho, rel=16 * EPS / p.sine)  # see the text of `problems`


@bounded
@given(regular_pairs, radii)
def test_optimal_value_is_rho_times_norm_of_q(p: Pair, rho: float) -> None:
    """⟨f, δ⟩ = ρ‖q‖ (Proposition 1)."""
    delta = dense(exact_rosu().inner(gram_of(p.vectors), rho).delta, p.vectors)
    # δ is off by EPS·ρ/sin θ, partly along r where ⟨f, ·⟩ weighs it with ‖f‖ = ‖q‖/sin θ.
    assert inner(p.f, delta) == pytest.approx(rho * norm(p.q), rel=16 * EPS / p.sine**2)


@bounded
@given(regular_pairs, radii, seeds)
def test_no_feasible_direction_forgets_more(p: Pair, rho: float, seed: int) -> None:
    """⟨f, g⟩ ≤ ⟨f, δ⟩ for random feasible g (Proposition 1)."""
    delta = dense(exact_rosu().inner(gram_of(p.vectors), rho).delta, p.vectors)
    gain = inner(p.f, delta)
    for g in feasible_directions(p.r, rho, 20, seed):
        # ⟨f, ·⟩ of vectors of norm ρ that are neutral up to EPS (g) and EPS/sin θ (δ).
        assert inner(p.f, g) <= gain + 16 * EPS * rho * norm(p.f) / p.sine


@bounded
@given(regular_pairs, radii, seeds)
def test_maximiser_is_unique(p: Pair, rho: float, seed: int) -> None:
    """Feasible g loses at least ‖q‖‖g − δ‖²/(2ρ), so only g = δ attains the maximum (Proposition 1)."""
    delta = dense(exact_rosu().inner(gram_of(p.vectors), rho).delta, p.vectors)
    for g in feasible_directions(p.r, rho, 20, seed):
        loss = norm(p.q) / (2.0 * rho) * norm(g - delta) ** 2
        slack = 16 * EPS * rho * norm(p.f) / p.sine  # as above
        assert inner(p.f, g) + loss <= rho * norm(p.q) + slack


def test_feasible_directions_come_close_to_the_maximum() -> None:
    """In two dimensions the feasible set is the segment ±δ: the bound is attained, not merely safe."""
    f, r = np.array([1.0, 2.0]), np.array([3.0, -1.0])
    gains = [inner(f, g) for g in feasible_directions(r, 0.5, 20, seed=1)]
    delta = dense(exact_rosu().inner(gram_of({"f": f, "r": r}), 0.5).delta, {"f": f, "r": r})
    assert max(gains) == pytest.approx(inner(f, delta), rel=16 * EPS)  # a handful of roundings


@pytest.mark.parametrize("kind", REGULAR)
@pytest.mark.parametrize("seed", range(3))
def test_without_measurement_the_direction_is_the_same(kind: str, seed: int) -> None:
    """The measurement is a refinement: without it δ keeps its direction and only its length suffers."""
    p = pair(kind, seed)
    answer = exact_rosu().inner(gram_of(p.vectors, measured=False), 0.4)
    delta = dense(answer.delta, p.vectors)
    # ‖q‖² expanded from terms of size ‖f‖² has relative error EPS/sin²θ.
    assert norm(delta) == pytest.approx(0.4, rel=32 * EPS / p.sine**2)
    assert norm(delta / norm(delta) - p.q / norm(p.q)) <= 16 * EPS / p.sine  # see the text of `problems`


def test_orthogonal_gradients_need_no_projection() -> None:
    """Where ⟨f, r⟩ = 0, q = f exactly and δ = ρ f/‖f‖."""
    p = pair("orthogonal", seed=3)
    answer = exact_rosu().inner(gram_of(p.vectors), 0.4)
    assert answer.delta["r"] == 0.0
    assert answer.delta["f"] == pytest.approx(0.4 / norm(p.f), rel=4 * EPS)  # one root, one quotient


@pytest.mark.parametrize(("kind", "precise"), [("random", False), ("orthogonal", False), ("parallel 1e-6", True)])
def test_precise_marks_small_differences_of_large_gradients(kind: str, precise: bool) -> None:
    """`precise` asks for float64 where δ = α f − αk r cancels."""
    p = pair(kind, seed=0)
    assert exact_rosu().inner(gram_of(p.vectors), 0.4).precise is precise


@bounded
@given(regular_pairs)
def test_perturbation_is_linear_in_the_radius(p: Pair) -> None:
    """δ(2ρ) = 2δ(ρ): the direction does not depend on the budget; doubling is exact in binary."""
    gram = gram_of(p.vectors)
    one, two = exact_rosu().inner(gram, 0.3), exact_rosu().inner(gram, 0.6)
    assert two.delta["f"] == 2.0 * one.delta["f"]
    assert two.delta["r"] == 2.0 * one.delta["r"]
    assert two.direction_norm == one.direction_norm


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e6, 1e12])
def test_perturbation_ignores_the_length_of_the_retain_gradient(scale: float) -> None:
    """P_r depends on the direction of r only, so δ does too (τ = 0)."""
    p = pair("random", seed=4)
    scaled = {"f": p.f, "r": scale * p.r}
    delta = dense(exact_rosu().inner(gram_of(scaled), 0.4).delta, scaled)
    reference = dense(exact_rosu().inner(gram_of(p.vectors), 0.4).delta, p.vectors)
    # Rounding of the scaled entries and of k, at an ordinary angle.
    np.testing.assert_allclose(delta, reference, rtol=0.0, atol=16 * EPS)


def test_zero_retain_gradient_leaves_the_standard_perturbation() -> None:
    """r = 0 constrains nothing: δ = ρ f/‖f‖, with or without τ."""
    f, r = np.array([3.0, 4.0]), np.zeros(2)
    for tau in (0.0, 1e-8):
        for mode in ("absolute", "relative"):
            answer = exact_rosu(tau, mode).inner(gram_of({"f": f, "r": r}), 1.0)
            assert answer.delta == 0.2 * F - 0.0 * R
            assert answer.direction_norm == 5.0
