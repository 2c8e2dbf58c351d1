"""Lemma 1 and eq. (9): the outer gradient is v = [I + (ρ/‖q‖)(I − P_r − P_⊥)] s; without Jacobian, v = s."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rosu_llm.geometry import R, S

from .problems import (
    EPS,
    Dense,
    Pair,
    bounded,
    dense,
    exact_rosu,
    gram_of,
    inner,
    norm,
    orthogonal_part,
    pair,
    projector,
    radii,
    regular_pairs,
    scales,
    seeds,
)


def outer_gradient(vectors: dict[str, Dense], rho: float, tau: float = 0.0, measured: bool = True) -> Dense:
    """v of the rule, dense."""
    rule = exact_rosu(tau)
    gram = gram_of(vectors, measured)
    return dense(rule.outer(gram, rule.inner(gram, rho)), vectors)


def surrogate(p: Pair, seed: int, scale: float) -> dict[str, Dense]:
    """The pair with a random surrogate gradient s."""
    return {**p.vectors, "s": scale * np.random.default_rng([4, seed]).normal(size=p.r.size)}


@bounded
@given(regular_pairs, seeds, scales, radii)
def test_outer_gradient_is_the_relaxed_transport(p: Pair, seed: int, scale: float, rho: float) -> None:
    """v = [I + (ρ/‖q‖)(I − P_r − P_⊥)] s against dense projectors, all scales independent (eq. 9)."""
    vectors = surrogate(p, seed, scale)
    alpha, identity = rho / norm(p.q), np.eye(p.r.size)
    expected = (identity + alpha * (identity - projector(p.r) - projector(p.q))) @ vectors["s"]
    # u = q/‖q‖ is known to EPS/sin θ and enters twice; everything is multiplied by α.
    allowed = 64 * EPS / p.sine * (1.0 + alpha) * norm(vectors["s"])
    assert norm(outer_gradient(vectors, rho) - expected) <= allowed


@bounded
@given(st.integers(0, 100), scales, st.sampled_from([1e-8, 1e-2, 1.0, 1e2]), radii, st.booleans())
def test_outer_gradient_with_stabiliser_is_line_8_of_the_algorithm(
    seed: int, r_scale: float, ratio: float, rho: float, measured: bool
) -> None:
    """v = s + α_τ(s − ⟨r,s⟩/(‖r‖²+τ) r − ⟨u_τ,s⟩u_τ) with q_τ for q throughout (Algorithm 1, line 8)."""
    p = pair("random", seed, 6, 1.0, r_scale)
    vectors = surrogate(p, seed, 1.0)
    s, tau = vectors["s"], ratio * inner(p.r, p.r)
    q = orthogonal_part(p.f, p.r, tau)
    u, alpha = q / norm(q), rho / norm(q)
    damped = np.outer(p.r, p.r) / (inner(p.r, p.r) + tau)
    expected = s + alpha * (s - damped @ s - inner(u, s) * u)
    # As above with ‖q_τ‖ for ‖q‖; squared, because without measurement ‖q_τ‖² is expanded.
    allowed = 64 * EPS * inner(p.f, p.f) / inner(q, q) * (1.0 + alpha) * norm(s)
    assert norm(outer_gradient(vectors, rho, tau, measured) - expected) <= allowed


@bounded
@given(regular_pairs, seeds, radii)
def test_correction_is_orthogonal_to_both_removed_directions(p: Pair, seed: int, rho: float) -> None:
    """⟨r, v⟩ = ⟨r, s⟩ and ⟨δ, v⟩ = ⟨δ, s⟩: the correction acts off r and off q only (Lemma 1, τ = 0)."""
    vectors = surrogate(p, seed, 1.0)
    v, s = outer_gradient(vectors, rho), vectors["s"]
    allowed = 64 * EPS / p.sine * (1.0 + rho / norm(p.q)) * norm(s)  # the error of v itself, as above
    assert abs(inner(p.r, v - s)) <= allowed * norm(p.r)
    assert abs(inner(p.q, v - s)) <= allowed * norm(p.q)


@bounded
@given(regular_pairs, seeds, radii)
def test_rest_of_the_space_is_amplified(p: Pair, seed: int, rho: float) -> None:
    """s ⟂ r, q is scaled by 1 + ρ/‖q‖: the eigenvalues of the transport are 1, 1 and 1 + α (Lemma 1)."""
    basis = np.linalg.qr(np.column_stack([p.r / norm(p.r), p.q / norm(p.q)]))[0]
    s = np.random.default_rng([5, seed]).normal(size=p.r.size)
    for _ in range(2):
        s = s - basis @ (basis.T @ s)
    alpha = rho / norm(p.q)
    v = outer_gradient({**p.vectors, "s": s}, rho)
    assert norm(v - (1.0 + alpha) * s) <= 64 * EPS / p.sine * (1.0 + alpha) * norm(s)  # as above


def test_transport_uses_the_measurement_where_u_cancels() -> None:
    """cos θ = 1 − 10⁻⁶, Gram matrix off by 10⁻⁹, s almost orthogonal to u: ⟨u, s⟩ must be measured.

    Expanded it would be a difference of terms of size ‖s‖/sin θ with relative error 1e-9.
    """
    p = pair("parallel 1e-6", seed=1)
    third = np.random.default_rng(9).normal(size=p.r.size)
    basis = np.linalg.qr(np.column_stack([p.r, p.q / norm(p.q)]))[0]
    s = p.r + (third - basis @ (basis.T @ third))
    vectors = {**p.vectors, "s": s}
    rule, gram = exact_rosu(), gram_of(vectors, noise=1e-9)
    v = dense(rule.outer(gram, rule.inner(gram, 1e-3)), vectors)
    alpha = 1e-3 / norm(p.q)
    # ⟨u, v⟩ = ⟨u, s⟩ = 0. Expanded, c₂ would be off by 1e-9/sin θ ≈ 1e-6 times α; measured it is exact to
    # EPS/sin θ, and the rest is the error 1e-9 of c₁ on r, to which u is orthogonal.
    assert abs(inner(p.q / norm(p.q), v)) <= 1e-9 * (1.0 + alpha) * norm(s)


@pytest.mark.parametrize("tau", [0.0, 1e-8, 1.0])
def test_zero_order_variant_uses_the_surrogate_gradient_itself(tau: float) -> None:
    """jacobian='none': v = s exactly, with the same δ as the relaxed rule (Algorithm 2)."""
    p = pair("random", seed=7)
    vectors = surrogate(p, 7, 1.0)
    gram = gram_of(vectors)
    plain, relaxed = exact_rosu(tau, jacobian="none"), exact_rosu(tau)
    assert plain.inner(gram, 0.4) == relaxed.inner(gram, 0.4)
    assert plain.outer(gram, plain.inner(gram, 0.4)) == S


def test_transport_tends_to_the_identity_with_the_radius() -> None:
    """ρ → 0: v → s, with the correction linear in ρ (Lemma 1)."""
    vectors = surrogate(pair("random", seed=8), 8, 1.0)
    small = outer_gradient(vectors, 1e-6) - vectors["s"]
    large = outer_gradient(vectors, 1.0) - vectors["s"]
    # The small correction is a difference of numbers of size ‖s‖ ≈ 2, divided by 1e-6.
    np.testing.assert_allclose(small / 1e-6, large, rtol=0.0, atol=32 * EPS / 1e-6)


def test_zero_retain_gradient_leaves_the_transport_of_the_standard_perturbation() -> None:
    """r = 0: v = [I + (ρ/‖f‖)(I − P_f)] s; no quotient by zero for τ = 0 or τ > 0."""
    f, s = np.array([3.0, 4.0, 0.0]), np.array([1.0, -2.0, 0.5])
    vectors = {"f": f, "r": np.zeros(3), "s": s}
    expected = (np.eye(3) + 0.1 * (np.eye(3) - projector(f))) @ s
    for tau in (0.0, 1e-8):
        v = outer_gradient(vectors, 0.5, tau)
        np.testing.assert_allclose(v, expected, rtol=0.0, atol=16 * EPS * norm(s))  # a dozen roundings


def test_no_inner_answer_means_retain_descent() -> None:
    """Without a surrogate point (inner is None) the descent gradient is r (Algorithm 1, line 4)."""
    gram = gram_of(pair("random").vectors)
    assert exact_rosu().outer(gram, None) == R
