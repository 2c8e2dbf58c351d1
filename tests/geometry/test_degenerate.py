"""Lemmas 3 and 5 and lines 3–4 of Algorithm 1: no trustworthy direction means plain retain descent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rosu_llm.geometry import Inner, R, Rosu, Stabilizer, Vector

from .problems import (
    COLLINEAR,
    EPS,
    Dense,
    at_angle,
    bounded,
    dense,
    exact_rosu,
    feasible_directions,
    gram_of,
    inner,
    norm,
    orthogonal_part,
    pair,
    radii,
    seeds,
)


def assert_falls_back(rule: Rosu, vectors: dict[str, Dense], measured: bool = True) -> None:
    """δ is empty, α is 0 and v is r exactly (Algorithm 1, line 4)."""
    gram = gram_of({**vectors, "s": np.ones(vectors["r"].size)}, measured)
    answer = rule.inner(gram, 0.4)
    assert answer.fallback
    assert answer.delta == Vector()
    assert answer.alpha == 0.0
    assert not answer.precise
    assert rule.outer(gram, answer) == R


@bounded
@given(seeds, st.floats(-9.0, 0.0), radii)
def test_inner_value_is_small_where_q_is(seed: int, exponent: float, rho: float) -> None:
    """‖q‖ ≤ ε_q implies ⟨f, g⟩ ≤ ρε_q for every feasible g (Lemma 3)."""
    p = at_angle(1.0, 10.0**exponent, seed, 5, r_norm=2.0)
    eps_q = norm(p.q)
    assert exact_rosu(eps_q=eps_q * (1.0 + 16 * EPS / p.sine)).inner(gram_of(p.vectors), rho).fallback
    for g in feasible_directions(p.r, rho, 20, seed):
        assert inner(p.f, g) <= rho * eps_q + 16 * EPS * rho * norm(p.f)  # g is neutral up to EPS


@bounded
@given(seeds, st.floats(-9.0, -1.0), st.sampled_from([1e-8, 1e-4, 1e-1, 10.0]), radii)
def test_regularised_inner_value_is_small_where_q_tau_is(seed: int, exponent: float, ratio: float, rho: float) -> None:
    """‖q_τ‖ ≤ ε_q implies ⟨f, g⟩ ≤ ρ(ε_q + τ/(‖r‖²+τ)‖f‖) for every feasible g (Lemma 5)."""
    p = at_angle(1.0, 10.0**exponent, seed, 5, r_norm=2.0)
    tau = ratio * inner(p.r, p.r)
    q_tau = norm(orthogonal_part(p.f, p.r, tau))
    # The smallest threshold at which the rule falls back, with room for the rounding of ‖q_τ‖.
    eps_q = q_tau + 16 * EPS * norm(p.f)
    assert exact_rosu(tau, eps_q=eps_q).inner(gram_of(p.vectors), rho).fallback
    assert not exact_rosu(tau, eps_q=q_tau - 16 * EPS * norm(p.f)).inner(gram_of(p.vectors), rho).fallback
    bound = rho * (eps_q + ratio / (1.0 + ratio) * norm(p.f))
    assert rho * norm(p.q) <= bound + 16 * EPS * rho * norm(p.f)  # the maximum itself (Proposition 1)
    for g in feasible_directions(p.r, rho, 10, seed):
        assert inner(p.f, g) <= bound + 16 * EPS * rho * norm(p.f)  # g is neutral up to EPS


@pytest.mark.parametrize("kind", COLLINEAR)
@pytest.mark.parametrize("f_scale", [1e-12, 1e-6, 1.0, 1e3])
@pytest.mark.parametrize("r_scale", [1e-12, 1e-6, 1.0, 1e6, 1e12])
def test_collinear_gradients_fall_back(kind: str, f_scale: float, r_scale: float) -> None:
    """q = 0: every neutral direction has zero gain, so none is injected (text after Proposition 1).

    τ = 0; ‖f‖ up to 10⁶, where the rounding left in q, EPS‖f‖ ≈ 1e-10, is still below ε_q = 10⁻⁶.
    """
    assert_falls_back(exact_rosu(eps_q=1e-6), pair(kind, 1, 6, f_scale, r_scale).vectors)


@pytest.mark.parametrize("kind", COLLINEAR)
def test_collinear_gradients_fall_back_without_measurement(kind: str) -> None:
    """The same from the Gram matrix alone; the integers of this pair make its expansion exact."""
    assert_falls_back(exact_rosu(eps_q=1e-6), pair(kind, 1).vectors, measured=False)


@pytest.mark.parametrize("mode", ["absolute", "relative"])
@pytest.mark.parametrize("tau", [0.0, 1e-8])
def test_zero_forget_gradient_falls_back(tau: float, mode: str) -> None:
    """f = 0: nothing to forget along, even at ε_q = 0."""
    for eps_q in (0.0, 1e-6):
        assert_falls_back(exact_rosu(tau, mode, eps_q=eps_q), {"f": np.zeros(3), "r": np.array([1.0, 2.0, 3.0])})


def test_both_gradients_zero_fall_back() -> None:
    """f = r = 0: a fallback, not a division by zero."""
    assert_falls_back(exact_rosu(), {"f": np.zeros(3), "r": np.zeros(3)})
    assert_falls_back(Rosu(), {"f": np.zeros(3), "r": np.zeros(3)})


def test_threshold_itself_falls_back() -> None:
    """The condition is ‖q_τ‖ ≤ ε_q, not < (Algorithm 1, line 3); powers of two make ‖q‖ exact."""
    vectors = {"f": np.array([0.0, 0.5]), "r": np.array([1.0, 0.0])}
    assert_falls_back(exact_rosu(eps_q=0.5), vectors)
    assert not exact_rosu(eps_q=np.nextafter(0.5, 0.0)).inner(gram_of(vectors), 0.4).fallback


def test_default_threshold_is_that_of_the_paper() -> None:
    """τ = 10⁻⁸, ε_q = 10⁻⁶ (§2.2): ‖q‖ = 0.9·10⁻⁶ falls back, 1.1·10⁻⁶ does not."""
    r = np.array([1.0, 0.0])
    assert Rosu().stabilizer == Stabilizer(1e-8, "absolute")
    assert_falls_back(Rosu(), {"f": np.array([0.0, 0.9e-6]), "r": r})
    assert not Rosu().inner(gram_of({"f": np.array([0.0, 1.1e-6]), "r": r}), 0.4).fallback


def test_zero_order_variant_falls_back_alike() -> None:
    """The fallback does not depend on the Jacobian (Algorithm 2, lines 3–4)."""
    assert_falls_back(exact_rosu(jacobian="none", eps_q=1e-6), pair("collinear", 2).vectors)


def test_fallback_reports_the_norm_it_saw() -> None:
    """The rejected ‖q_τ‖ is kept for the record."""
    vectors = {"f": np.array([0.0, 0.25]), "r": np.array([1.0, 0.0])}
    answer = exact_rosu(eps_q=0.5).inner(gram_of(vectors), 0.4)
    assert answer == Inner(Vector(), 0.25, alpha=0.0, fallback=True)


@pytest.mark.parametrize("kind", COLLINEAR)
@pytest.mark.parametrize("tau", [1e-8, 1e-4])
@pytest.mark.parametrize("mode", ["absolute", "relative"])
@pytest.mark.parametrize("f_scale", [1.0, 1e3, 1e9])
def test_collinear_gradients_fall_back_whatever_their_size(kind: str, tau: float, mode: str, f_scale: float) -> None:
    """f = ±kr, τ > 0: q_τ is all residue along r. Algorithm 1 to the letter would take δ = ±ρ r/‖r‖ once
    ‖q_τ‖ exceeds the absolute ε_q: the most retain-damaging step there is. The rule falls back instead."""
    p = pair(kind, 3, 6, f_scale, 1.0)
    assert norm(orthogonal_part(p.f, p.r, tau)) > 1e-12
    assert_falls_back(Rosu(tau=tau, tau_mode=mode, eps_q=1e-14), p.vectors)


def test_residue_that_is_a_minority_is_tolerated() -> None:
    """The guard looks at the direction, not at the size: with q_⊥ twice the residue the step is taken."""
    r = np.array([1.0, 0.0])
    tau = 1e-4
    residue = 5.0 * tau / (1.0 + tau)
    taken = {"f": np.array([5.0, 2.0 * residue]), "r": r}
    refused = {"f": np.array([5.0, 0.5 * residue]), "r": r}
    assert not Rosu(tau=tau, eps_q=1e-14).inner(gram_of(taken), 0.4).fallback
    assert_falls_back(Rosu(tau=tau, eps_q=1e-14), refused)


@pytest.mark.parametrize("kind", COLLINEAR)
def test_a_vanishing_retain_gradient_does_not_stop_the_step(kind: str) -> None:
    """‖r‖² < τ: there is nothing to protect, δ follows f as τ intends."""
    p = pair(kind, 3)
    tau = 10.0 * inner(p.r, p.r)
    answer = Rosu(tau=tau).inner(gram_of(p.vectors), 0.4)
    assert not answer.fallback
    assert norm(dense(answer.delta, p.vectors) - 0.4 * p.f / norm(p.f)) <= 16 * EPS * 0.4  # no cancellation
