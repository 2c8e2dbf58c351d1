"""Lemma 2: the regularised projector is the projector damped by ‖r‖²/(‖r‖²+τ)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rosu_llm.geometry import F, Stabilizer, Vector, retain_orthogonal

from .problems import (
    EPS,
    Dense,
    bounded,
    dense,
    gram_of,
    inner,
    norm,
    operator_norm,
    pair,
    projector,
    scales,
    seeds,
)

RATIOS = (0.0, 1e-8, 1e-3, 1.0, 1e3)


def projector_matrix(r: Dense, stabilizer: Stabilizer) -> Dense:
    """P_r^(τ) as the package applies it: x − (I − P_r^(τ)) x for every unit vector x."""
    vectors = {f"e{i}": e for i, e in enumerate(np.eye(r.size))} | {"r": r}
    gram = gram_of(vectors)
    columns = []
    for i, e in enumerate(np.eye(r.size)):
        columns.append(e - dense(retain_orthogonal(Vector.named(f"e{i}"), gram, stabilizer), vectors))
    return np.column_stack(columns)


@bounded
@given(seeds, scales, st.sampled_from(RATIOS), st.sampled_from(["absolute", "relative"]))
def test_regularised_projector_is_a_damped_projector(seed: int, scale: float, ratio: float, mode: str) -> None:
    """P_r^(τ) = ‖r‖²/(‖r‖²+τ) P_r (Lemma 2)."""
    r = pair("random", seed, 5, r_scale=scale).r
    stabilizer = Stabilizer(ratio if mode == "relative" else ratio * inner(r, r), mode)
    # Entries of size at most 1 with a handful of roundings each, one of them in e − (e − k r).
    np.testing.assert_allclose(projector_matrix(r, stabilizer), projector(r) / (1.0 + ratio), rtol=0.0, atol=16 * EPS)


@bounded
@given(seeds, scales, st.sampled_from(RATIOS))
def test_distance_to_the_projector(seed: int, scale: float, ratio: float) -> None:
    """‖P_r^(τ) − P_r‖ = τ/(‖r‖²+τ), and `Stabilizer.residue` reports it (Lemma 2)."""
    r = pair("random", seed, 5, r_scale=scale).r
    tau = ratio * inner(r, r)
    distance = operator_norm(projector_matrix(r, Stabilizer(tau)) - projector(r))
    assert abs(distance - tau / (inner(r, r) + tau)) <= 64 * EPS  # a 5×5 singular value of entries ≤ 1
    residue = Stabilizer(tau).residue(inner(r, r))
    assert residue == pytest.approx(tau / (inner(r, r) + tau), rel=4 * EPS)  # one sum, one quotient


@bounded
@given(st.sampled_from(["random", "parallel 1e-6"]), seeds, scales, scales, st.sampled_from(RATIOS))
def test_regularised_direction_stays_close(kind: str, seed: int, f_scale: float, r_scale: float, ratio: float) -> None:
    """‖q_τ − q‖ = τ/(‖r‖²+τ) ‖P_r f‖ ≤ τ/(‖r‖²+τ) ‖f‖ (Lemma 2)."""
    p = pair(kind, seed, 5, f_scale, r_scale)
    tau = ratio * inner(p.r, p.r)
    q_tau = dense(retain_orthogonal(F, gram_of(p.vectors), Stabilizer(tau)), p.vectors)
    share = ratio / (1.0 + ratio)
    rounding = 16 * EPS * norm(p.f)  # q_τ is formed from terms of size ‖f‖
    assert abs(norm(q_tau - p.q) - share * abs(p.cosine) * norm(p.f)) <= rounding
    assert norm(q_tau - p.q) <= share * norm(p.f) + rounding


@pytest.mark.parametrize("ratio", RATIOS)
def test_regularised_projection_is_idempotent_only_without_tau(ratio: float) -> None:
    """(P_r^(τ))² = P_r^(τ)/(1 + τ/‖r‖²): a projector at τ = 0 only (proof of Lemma 4)."""
    r = pair("random", seed=2, dim=5).r
    matrix = projector_matrix(r, Stabilizer(ratio * inner(r, r)))
    # Two 5×5 matrices with entries ≤ 1.
    np.testing.assert_allclose(matrix @ matrix, matrix / (1.0 + ratio), rtol=0.0, atol=64 * EPS)


@pytest.mark.parametrize("tau", [0.0, 1e-8])
@pytest.mark.parametrize("mode", ["absolute", "relative"])
def test_zero_retain_gradient_projects_nothing(tau: float, mode: str) -> None:
    """r = 0: (I − P_r^(τ)) x = x, with no division by zero."""
    f = np.array([1.0, 2.0])
    q = retain_orthogonal(F, gram_of({"f": f, "r": np.zeros(2)}), Stabilizer(tau, mode))
    assert q["f"] == 1.0
    assert q["r"] == 0.0
