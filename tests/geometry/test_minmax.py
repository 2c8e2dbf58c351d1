"""Standard min–max (eq. 3) and UAM against dense formulas, and ROSU as min–max plus the projection."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from rosu_llm.geometry import R, S, Vector
from rosu_llm.geometry.methods.minmax import MinMax
from rosu_llm.geometry.methods.uam import Uam

from .problems import (
    EPS,
    Pair,
    bounded,
    dense,
    exact_rosu,
    gram_of,
    inner,
    norm,
    pair,
    projector,
    radii,
    regular_pairs,
    scales,
    seeds,
)


@bounded
@given(regular_pairs, radii)
def test_standard_perturbation_follows_the_forget_gradient(p: Pair, rho: float) -> None:
    """δ_std = ρ f/‖f‖ for MinMax and Uam alike (eq. 3)."""
    for rule in (MinMax(eps_q=0.0), Uam(eps_q=0.0)):
        answer = rule.inner(gram_of(p.vectors), rho)
        # One root, one quotient, one product; no cancellation.
        np.testing.assert_allclose(dense(answer.delta, p.vectors), rho * p.f / norm(p.f), rtol=8 * EPS)
        assert answer.direction_norm == pytest.approx(norm(p.f), rel=4 * EPS)
        assert answer.alpha == pytest.approx(rho / norm(p.f), rel=4 * EPS)
        assert not answer.fallback
        assert not answer.precise


@bounded
@given(regular_pairs, radii)
def test_standard_perturbation_has_a_first_order_retain_effect(p: Pair, rho: float) -> None:
    """⟨r, δ_std⟩ = ρ‖r‖cos θ (§2.1)."""
    delta = dense(MinMax(eps_q=0.0).inner(gram_of(p.vectors), rho).delta, p.vectors)
    assert abs(inner(p.r, delta) - rho * norm(p.r) * p.cosine) <= 16 * EPS * rho * norm(p.r)  # sum of 8 products


@bounded
@given(regular_pairs, seeds, scales, radii)
def test_minmax_transport(p: Pair, seed: int, scale: float, rho: float) -> None:
    """v = [I + (ρ/‖f‖)(I − P_f)] s: ROSU's transport without P_r."""
    s = scale * np.random.default_rng([10, seed]).normal(size=p.r.size)
    vectors = {**p.vectors, "s": s}
    rule, gram = MinMax(eps_q=0.0), gram_of(vectors)
    v = dense(rule.outer(gram, rule.inner(gram, rho)), vectors)
    alpha, identity = rho / norm(p.f), np.eye(p.r.size)
    expected = (identity + alpha * (identity - projector(p.f))) @ s
    assert norm(v - expected) <= 32 * EPS * (1.0 + alpha) * norm(s)  # two terms of size α‖s‖


@pytest.mark.parametrize("seed", range(5))
def test_minmax_transport_is_exact_for_an_identity_hessian(seed: int) -> None:
    """With ∇²L_f = I, v is the exact gradient of L_r(w + δ_std(w)) (A2; there is no projector to relax).

    The exact gradient is taken by complex steps, Im F(w + ih e)/h with h = 10⁻³⁰.
    """
    rng = np.random.default_rng([11, seed])
    w, forget_linear, retain_linear = rng.normal(size=(3, 5))
    hessian = np.diag(rng.normal(size=5))
    rho = 0.7

    def objective(point: np.ndarray) -> complex:
        f = point + forget_linear
        x = point + rho * f / np.sqrt(f @ f)
        return complex(0.5 * x @ hessian @ x + retain_linear @ x)

    exact = np.array([objective(w + 1e-30j * e).imag / 1e-30 for e in np.eye(5)])
    f, r = w + forget_linear, hessian @ w + retain_linear
    s = hessian @ (w + rho * f / norm(f)) + retain_linear
    vectors = {"f": f, "r": r, "s": s}
    rule, gram = MinMax(), gram_of(vectors)
    v = dense(rule.outer(gram, rule.inner(gram, rho)), vectors)
    assert norm(v - exact) <= 64 * EPS * (1.0 + rho / norm(f)) * norm(s)  # two dozen roundings


def test_minmax_differs_from_rosu_by_the_projection_only() -> None:
    """f ⟂ r: the same δ, and v_minmax − v_rosu = (ρ/‖f‖) P_r s."""
    p = pair("orthogonal", seed=2)
    s = np.random.default_rng(3).normal(size=6)
    vectors = {**p.vectors, "s": s}
    gram = gram_of(vectors)
    minmax, rosu = MinMax(), exact_rosu()
    one, other = minmax.inner(gram, 0.4), rosu.inner(gram, 0.4)
    assert dense(one.delta, vectors) == pytest.approx(dense(other.delta, vectors), rel=8 * EPS)  # same formula
    difference = dense(minmax.outer(gram, one) - rosu.outer(gram, other), vectors)
    expected = 0.4 / norm(p.f) * projector(p.r) @ s
    assert norm(difference - expected) <= 64 * EPS * (1.0 + 0.4 / norm(p.f)) * norm(s)  # two transports


@pytest.mark.parametrize("rule", [MinMax(jacobian="none"), Uam()])
def test_without_jacobian_the_surrogate_gradient_is_the_answer(rule: MinMax) -> None:
    """v = s exactly."""
    p = pair("random", seed=1)
    gram = gram_of({**p.vectors, "s": np.ones(6)})
    assert rule.outer(gram, rule.inner(gram, 0.4)) == S


@pytest.mark.parametrize("rule", [MinMax(), Uam()])
@pytest.mark.parametrize("size", [0.0, 0.9e-6])
def test_vanishing_forget_gradient_falls_back(rule: MinMax, size: float) -> None:
    """‖f‖ ≤ ε_q: no δ, α = 0 and v = r."""
    gram = gram_of({"f": np.array([0.0, size]), "r": np.ones(2), "s": np.ones(2)})
    answer = rule.inner(gram, 0.4)
    assert answer.fallback
    assert answer.delta == Vector()
    assert answer.alpha == 0.0
    assert answer.direction_norm == size
    assert rule.outer(gram, answer) == R
    assert rule.outer(gram, None) == R


def test_threshold_itself_falls_back() -> None:
    """‖f‖ = ε_q falls back, as for ROSU; powers of two make ‖f‖ exact."""
    gram = gram_of({"f": np.array([0.0, 0.5]), "r": np.ones(2)})
    assert MinMax(eps_q=0.5).inner(gram, 0.4).fallback
    assert not MinMax(eps_q=0.25).inner(gram, 0.4).fallback


def test_what_each_rule_asks_of_the_engine() -> None:
    """Both perturb and capture f and r; only MinMax amplifies along δ."""
    for rule, pulls in ((MinMax(), True), (Uam(), False)):
        assert rule.passes == ("forget", "retain")
        assert rule.perturbs
        assert rule.pulls is pulls
