"""Rank-k protection through the Gram matrix against QR; OrthoGrad and GU against dense float64 formulas."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rosu_llm.errors import ConfigError, DataError
from rosu_llm.geometry import F, R, Rosu, S, Vector, build_rule
from rosu_llm.geometry.methods.gu import GU
from rosu_llm.geometry.methods.orthograd import OrthoGrad
from rosu_llm.geometry.methods.rosu_subspace import SubspaceRosu
from rosu_llm.geometry.subspace import Protection, Subspace, check_independent

from .problems import EPS, Dense, bounded, dense, gram_of, norm, operator_norm, pair, seeds

ranks = st.integers(1, 5)
DIM = 9


def problem(seed: int, k: int, spread: float = 1.0) -> dict[str, Dense]:
    """f, r, s and k per-sample gradients around r whose lengths differ by powers of ten."""
    rng = np.random.default_rng([11, seed])
    vectors = {"f": rng.normal(size=DIM), "r": rng.normal(size=DIM), "s": rng.normal(size=DIM)}
    for i in range(k):
        vectors[f"r{i + 1}"] = 10.0 ** rng.integers(-3, 4) * (vectors["r"] + spread * rng.normal(size=DIM))
    return vectors


def basis(vectors: dict[str, Dense], k: int, mean: bool = False) -> Dense:
    """Q of the thin QR decomposition of the per-sample gradients."""
    columns = [vectors[f"r{i + 1}"] for i in range(k)] + ([vectors["r"]] if mean else [])
    return np.linalg.qr(np.column_stack([c / norm(c) for c in columns]))[0]


def relaxed(vectors: dict[str, Dense], q_basis: Dense, rho: float) -> tuple[Dense, Dense]:
    """δ and v of the paper's rank-k form, by explicit matrices."""
    f, s, eye = vectors["f"], vectors["s"], np.eye(DIM)
    projector = q_basis @ q_basis.T
    q = (eye - projector) @ f
    across = np.outer(q, q) / (q @ q)
    v = (eye + rho / norm(q) * (eye - projector - across)) @ s
    return rho * q / norm(q), v


@bounded
@given(seeds, st.integers(2, 5), st.booleans(), st.floats(1e-3, 10.0))
def test_rank_k_rosu_is_the_papers_qr_form(seed: int, k: int, mean: bool, rho: float) -> None:
    vectors = problem(seed, k)
    gram = gram_of(vectors)
    rule = SubspaceRosu(protect_rank=k, include_mean=mean)
    inner = rule.inner(gram, rho)
    delta, v = relaxed(vectors, basis(vectors, k, mean), rho)
    assert not inner.fallback
    np.testing.assert_allclose(dense(inner.delta, vectors), delta, rtol=0, atol=1e-10 * rho)
    np.testing.assert_allclose(dense(rule.outer(gram, inner), vectors), v, rtol=0, atol=1e-10 * norm(v))
    # every protected direction is neutral (Proposition on subspace-constrained ROSU)
    for i in range(k):
        direction = vectors[f"r{i + 1}"]
        assert abs(direction @ dense(inner.delta, vectors)) <= 1e-10 * norm(direction) * rho


@bounded
@given(seeds, st.integers(2, 5))
def test_nearly_dependent_samples_are_still_qr_to_1e_10(seed: int, k: int) -> None:
    """Gradients that agree to three digits: the Gram matrix loses six, the second projection brings them back."""
    vectors = problem(seed, k, spread=1e-3)
    span = Protection(k, mean=False).span(gram_of(vectors))
    assert span.rank == k
    expected = vectors["f"] - basis(vectors, k) @ (basis(vectors, k).T @ vectors["f"])
    np.testing.assert_allclose(dense(span.without(F), vectors), expected, rtol=0, atol=1e-10 * norm(vectors["f"]))


def test_the_projector_is_that_of_qr() -> None:
    """As a matrix, column by column."""
    vectors = {**problem(3, 4), **{f"e{j}": e for j, e in enumerate(np.eye(DIM))}}
    span = Protection(4, mean=False).span(gram_of(vectors))
    columns = [dense(span.project(Vector.named(f"e{j}")), vectors) for j in range(DIM)]
    q = basis(vectors, 4)
    assert operator_norm(np.column_stack(columns) - q @ q.T) < 1e-10


@bounded
@given(seeds, st.sampled_from(["random", "orthogonal", "parallel 1e-6"]), st.floats(1e-2, 10.0))
def test_the_mean_alone_is_rank_one_rosu(seed: int, kind: str, rho: float) -> None:
    vectors = {**pair(kind, seed, DIM).vectors, "s": np.random.default_rng([3, seed]).normal(size=DIM)}
    gram = gram_of(vectors)
    one, many = Rosu(tau=0.0), SubspaceRosu()
    mine, theirs = many.inner(gram, rho), one.inner(gram, rho)
    tolerance = 64 * EPS * norm(vectors["f"]) / theirs.direction_norm
    np.testing.assert_allclose(dense(mine.delta, vectors), dense(theirs.delta, vectors), rtol=0, atol=tolerance * rho)
    v = dense(one.outer(gram, theirs), vectors)
    got = dense(many.outer(gram, mine), vectors)
    np.testing.assert_allclose(got, v, rtol=0, atol=tolerance * max(norm(v), 1.0 + theirs.alpha))


def test_rank_one_by_name_is_algorithm_1_itself() -> None:
    assert build_rule("rosu", protect_rank=1) == build_rule("rosu") == Rosu()
    assert build_rule("rosu", protect_rank=1, include_mean=True) == Rosu()
    assert build_rule("rosu", protect_rank=4, include_mean=True) == SubspaceRosu(protect_rank=4, include_mean=True)


@bounded
@given(seeds)
def test_larger_subspaces_leave_less_forget_gain(seed: int) -> None:
    """⟨f, δ⟩ falls along nested subspaces, and below rank one's where the mean is in the span."""
    vectors = problem(seed, 5)
    gram, rho = gram_of(vectors), 0.7
    gains = []
    for k in range(2, 6):
        delta = dense(SubspaceRosu(protect_rank=k, include_mean=False).inner(gram, rho).delta, vectors)
        gains.append(float(vectors["f"] @ delta))
    slack = 1e-10 * rho * norm(vectors["f"])
    assert all(b <= a + slack for a, b in pairwise(gains))
    assert gains[-1] < gains[0]
    one = dense(SubspaceRosu().inner(gram, rho).delta, vectors)
    both = dense(SubspaceRosu(protect_rank=3, include_mean=True).inner(gram, rho).delta, vectors)
    assert vectors["f"] @ both <= vectors["f"] @ one + slack
    assert abs(vectors["r"] @ both) <= 1e-10 * rho * norm(vectors["r"])


def test_dependent_and_zero_samples_are_dropped() -> None:
    vectors = problem(5, 2)
    vectors["r3"] = 2.0 * vectors["r1"] - 1e3 * vectors["r2"]
    vectors["r4"] = np.zeros(DIM)
    span, two = (Protection(k, mean=False).span(gram_of(vectors)) for k in (4, 2))
    assert span.rank == 2
    a, b = dense(span.without(F), vectors), dense(two.without(F), vectors)
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-10 * norm(vectors["f"]))


@pytest.mark.parametrize(("noise", "rank"), [(1e-7, 2), (1e-6, 2), (1e-4, 3)])
def test_noise_of_float32_does_not_count_as_a_direction(noise: float, rank: int) -> None:
    """The line is drawn at 10⁻⁵ of a gradient's length."""
    vectors = problem(6, 2)
    sum_of_units = vectors["r1"] / norm(vectors["r1"]) + vectors["r2"] / norm(vectors["r2"])
    vectors["r3"] = sum_of_units + noise * np.random.default_rng(0).normal(size=DIM)
    assert Protection(3, mean=False).span(gram_of(vectors)).rank == rank


def test_without_any_retain_gradient_there_is_nothing_to_protect() -> None:
    """As at rank one with r = 0: δ follows f."""
    vectors = {"f": np.arange(1.0, 4.0), "r": np.zeros(3), "r1": np.zeros(3), "r2": np.zeros(3)}
    rule, gram = SubspaceRosu(protect_rank=2, include_mean=True), gram_of(vectors)
    np.testing.assert_allclose(dense(rule.inner(gram, 0.5).delta, vectors), 0.5 * vectors["f"] / norm(vectors["f"]))
    assert rule.protected(gram).rank == 0


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e9])
def test_a_forget_gradient_in_the_span_falls_back_to_retain_descent(scale: float) -> None:
    vectors = problem(7, 3)
    vectors["f"] = scale * (vectors["r1"] / norm(vectors["r1"]) - 0.3 * vectors["r2"] / norm(vectors["r2"]))
    rule, gram = SubspaceRosu(protect_rank=3, include_mean=False, eps_q=1e-30), gram_of(vectors)
    inner = rule.inner(gram, 0.5)
    assert inner.fallback
    assert rule.outer(gram, inner) == R


def test_a_window_with_fewer_samples_protects_what_it_has() -> None:
    vectors = problem(8, 2)
    short, exact = (Protection(k, mean=False).span(gram_of(vectors)) for k in (6, 2))
    assert short.basis == exact.basis


def test_repeated_samples_are_an_error() -> None:
    vectors = problem(9, 1)
    vectors.update(r2=-3.0 * vectors["r1"], r3=np.zeros(DIM))
    with pytest.raises(DataError, match="2 retain samples all point in one direction"):
        check_independent(gram_of(vectors), 3)
    vectors["r3"] = vectors["s"]
    check_independent(gram_of(vectors), 3)
    check_independent(gram_of(vectors), 1)
    assert Subspace.spanned_by([R, R], gram_of(vectors)).rank == 1


@bounded
@given(seeds, ranks, st.floats(0.0, 1.0))
def test_orthograd_is_its_dense_formula(seed: int, k: int, alpha: float) -> None:
    vectors = problem(seed, k)
    q = basis(vectors, k)
    f, r = vectors["f"], vectors["r"]
    expected = alpha * r - (1.0 - alpha) * (f - q @ (q.T @ f))
    v = dense(
        OrthoGrad(protect_rank=k, include_mean=False, orthograd_alpha=alpha).outer(gram_of(vectors), None), vectors
    )
    np.testing.assert_allclose(v, expected, rtol=0, atol=1e-10 * (norm(f) + norm(r)))


@bounded
@given(seeds, ranks)
def test_gu_is_its_dense_formula(seed: int, k: int) -> None:
    vectors = problem(seed, k)
    q = basis(vectors, k)
    f, r = vectors["f"], vectors["r"]
    expected = -((np.eye(DIM) - q @ q.T) @ f - q @ q.T @ r)
    v = dense(GU(protect_rank=k, include_mean=False).outer(gram_of(vectors), None), vectors)
    np.testing.assert_allclose(v, expected, rtol=0, atol=1e-10 * (norm(f) + norm(r)))


@pytest.mark.parametrize("jacobian", ["relaxed", "none"])
def test_ablations_keep_their_meaning_at_rank_k(jacobian: str) -> None:
    vectors = problem(2, 3)
    gram = gram_of(vectors)
    rule = build_rule("rosu", protect_rank=3, jacobian=jacobian, components="delta_only")
    assert rule.outer(gram, rule.inner(gram, 0.3)) == Vector()
    rule = build_rule("rosu", protect_rank=3, jacobian=jacobian, components="v_only")
    assert not rule.pulls
    assert (rule.outer(gram, rule.inner(gram, 0.3)) == S) == (jacobian == "none")


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("graddiff", {"protect_rank": 4}, "protect_rank=4 does nothing for method='graddiff'"),
        ("minmax", {"include_mean": True}, "include_mean"),
        ("orthograd", {"metric": "adam"}, "rosu, gu"),
        ("torchjd.UPGrad", {"metric": "adam"}, "does nothing"),
        ("rosu", {"protect_rank": 0}, "whole number ≥ 1"),
        ("gu", {"protect_rank": 2.5}, "whole number"),
        ("rosu", {"metric": "adm"}, "adam"),
        ("rosu", {"protect_rank": 2, "jacobian": "exact"}, "one protected direction"),
        ("rosu", {"metric": "adam", "jacobian": "no_a1"}, "Euclidean"),
        ("orthograd", {"orthograd_alpha": 1.5}, "orthograd_alpha=1.5"),
        ("orthograd", {"orthograd_alpha": float("nan")}, "between 0"),
    ],
)
def test_what_cannot_work_is_refused(method: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_rule(method, **options)
