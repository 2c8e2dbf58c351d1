"""Lemma 4: what dropping the cross-term P_τ P_r^(τ) from the regularised relaxed Jacobian costs."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

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
    gram_of,
    inner,
    norm,
    operator_norm,
    orthogonal_part,
    pair,
    projector,
    radii,
    seeds,
)


@dataclass(frozen=True)
class Jacobians:
    """Product form, implemented form and the dropped term, all dense."""

    product: Dense
    implemented: Dense
    dropped: Dense
    rounding: float


def jacobians(p: Pair, tau: float, rho: float) -> Jacobians:
    """The implemented form is read off the package: v − s for every unit vector in the place of s."""
    identity = np.eye(p.r.size)
    q = orthogonal_part(p.f, p.r, tau)
    alpha, p_tau = rho / norm(q), projector(q)
    damped = np.outer(p.r, p.r) / (inner(p.r, p.r) + tau)
    rule = exact_rosu(tau)
    columns = []
    for e in identity:
        vectors = {**p.vectors, "s": e}
        gram = gram_of(vectors)
        columns.append(dense(rule.outer(gram, rule.inner(gram, rho)), vectors) - e)
    # v − e rounds at 1 + α; u_τ is known to EPS‖f‖/‖q_τ‖.
    rounding = 128 * EPS * (1.0 + alpha) * norm(p.f) / norm(q)
    product = alpha * (identity - p_tau) @ (identity - damped)
    return Jacobians(product, np.column_stack(columns), alpha * p_tau @ damped, rounding)


pairs = st.builds(pair, st.sampled_from(["random", "orthogonal", "parallel 1e-6"]), seeds, st.integers(3, 6))
ratios = st.sampled_from([1e-8, 1e-3, 0.1, 1.0, 30.0])


@bounded
@given(pairs, ratios, radii)
def test_difference_is_the_cross_term(p: Pair, ratio: float, rho: float) -> None:
    """Ĵ_prod − Ĵ_impl = (ρ/‖q_τ‖) P_τ P_r^(τ) (Lemma 4).

    Ĵ_impl is symmetric, so that the transposed form in the gradient is the same matrix.
    """
    j = jacobians(p, ratio * inner(p.r, p.r), rho)
    assert operator_norm(j.product - j.implemented - j.dropped) <= j.rounding
    assert operator_norm(j.implemented - j.implemented.T) <= j.rounding


@bounded
@given(pairs, ratios, radii)
def test_norm_of_the_cross_term_and_its_bound(p: Pair, ratio: float, rho: float) -> None:
    """‖Ĵ_prod − Ĵ_impl‖ = ρτ|⟨f,r⟩|‖r‖/(‖q_τ‖²(‖r‖²+τ)²), at most the same with ‖f‖‖r‖² (Lemma 4)."""
    b = inner(p.r, p.r)
    tau = ratio * b
    j = jacobians(p, tau, rho)
    difference = operator_norm(j.product - j.implemented)
    common = rho * tau / (norm(orthogonal_part(p.f, p.r, tau)) ** 2 * (b + tau) ** 2)
    assert abs(difference - common * abs(inner(p.f, p.r)) * norm(p.r)) <= j.rounding
    assert difference <= common * norm(p.f) * b + j.rounding


@bounded
@given(pairs, radii)
def test_cross_term_vanishes_without_tau(p: Pair, rho: float) -> None:
    """τ = 0: product and implemented form agree (text after Lemma 4)."""
    j = jacobians(p, 0.0, rho)
    assert operator_norm(j.product - j.implemented) <= j.rounding


def test_cross_term_shrinks_linearly_with_tau() -> None:
    """Away from the degenerate branch the error is linear in τ (text after Lemma 4)."""
    p = pair("random", seed=5)
    previous = inf
    for tau in (1e-2, 1e-3, 1e-4):
        j = jacobians(p, tau, 0.4)
        difference = operator_norm(j.product - j.implemented)
        if previous < inf:
            # 1/(‖r‖²+τ)² and ‖q_τ‖ move by a relative τ/‖r‖² ≤ 1e-2 or so between two values.
            assert difference == pytest.approx(0.1 * previous, rel=0.05)
        previous = difference
