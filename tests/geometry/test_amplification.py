"""Proposition 7: βδ forgets more at no first-order retain cost, and no neutral step as long beats it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .problems import (
    EPS,
    Dense,
    Pair,
    bounded,
    dense,
    exact_rosu,
    feasible_directions,
    gram_of,
    inner,
    norm,
    radii,
    regular_pairs,
    seeds,
)

betas = st.floats(1e-3, 10.0)


def perturbation(p: Pair, rho: float) -> Dense:
    """δ_rosu."""
    return dense(exact_rosu().inner(gram_of(p.vectors), rho).delta, p.vectors)


@bounded
@given(regular_pairs, seeds, radii, betas, st.floats(1e-6, 1.0))
def test_amplification_has_no_first_order_retain_effect(
    p: Pair, seed: int, rho: float, beta: float, rate: float
) -> None:
    """⟨r, βδ − ηv⟩ = −η⟨r, v⟩ = −η⟨r, s⟩ for the complete update (Proposition 7 (i))."""
    s = np.random.default_rng([9, seed]).normal(size=p.r.size)
    vectors = {**p.vectors, "s": s}
    rule, gram = exact_rosu(), gram_of(vectors)
    answer = rule.inner(gram, rho)
    update = dense(beta * answer.delta - rate * rule.outer(gram, answer), vectors)
    v = s + rho / norm(p.q) * (s - inner(p.r, s) / inner(p.r, p.r) * p.r - inner(p.q, s) / inner(p.q, p.q) * p.q)
    # Errors of βδ (EPS·βρ/sin θ) and of ηv (EPS·η(1 + α)‖s‖/sin θ), weighed with ‖r‖.
    size = beta * rho + rate * (1.0 + rho / norm(p.q)) * norm(s)
    assert abs(inner(p.r, update) + rate * inner(p.r, v)) <= 64 * EPS / p.sine * size * norm(p.r)


@bounded
@given(regular_pairs, radii, betas)
def test_amplification_adds_forget_gain(p: Pair, rho: float, beta: float) -> None:
    """⟨f, βδ⟩ = βρ‖q‖ > 0 (Proposition 7 (ii))."""
    gain = inner(p.f, beta * perturbation(p, rho))
    assert gain == pytest.approx(beta * rho * norm(p.q), rel=16 * EPS / p.sine**2)  # as for Proposition 1
    assert gain > 0.0


@bounded
@given(regular_pairs, radii, betas, seeds)
def test_amplification_is_the_best_neutral_displacement(p: Pair, rho: float, beta: float, seed: int) -> None:
    """⟨f, ζ⟩ + ‖q‖‖ζ − βδ‖²/(2βρ) ≤ ⟨f, βδ⟩ for neutral ‖ζ‖ ≤ βρ, so βδ alone is best (Prop. 7 (iii))."""
    step = beta * perturbation(p, rho)
    slack = 16 * EPS * beta * rho * norm(p.f) / p.sine  # neutral up to EPS/sin θ, as for Proposition 1
    assert norm(step) <= beta * rho * (1.0 + 16 * EPS / p.sine)
    for zeta in feasible_directions(p.r, beta * rho, 20, seed):
        loss = norm(p.q) / (2.0 * beta * rho) * norm(zeta - step) ** 2
        assert inner(p.f, zeta) + loss <= inner(p.f, step) + slack
