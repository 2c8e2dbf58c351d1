"""PCGrad in both forms, BLUR, the forms of UAM and sharpness-aware forgetting against dense float64 formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rosu_llm.errors import ConfigError
from rosu_llm.geometry import F, Gram, R, build_rule
from rosu_llm.geometry.methods.minmax import MinMax
from rosu_llm.geometry.methods.pcgrad import Blur, PCGrad, PCGradConflict
from rosu_llm.geometry.methods.sam_npo import SharpnessAware
from rosu_llm.geometry.methods.uam import UamReflected, UamRelaxed

from .problems import Dense, Pair, bounded, dense, gram_of, norm, radii, regular_pairs, scales, seeds

#: Zero or of ordinary size: the square of a smaller one underflows, and with it the norm the tolerance is made of.
weights = st.just(0.0) | st.floats(1e-3, 10.0)


def without(x: Dense, direction: Dense) -> Dense:
    """(I − dd^T/‖d‖²) x, by the explicit matrix."""
    unit = direction / norm(direction)
    matrix: Dense = np.eye(x.size) - np.outer(unit, unit)
    return np.asarray(matrix @ x)


def close(got: Dense, expected: Dense, *sizes: Dense) -> None:
    """Equal up to the rounding of terms as long as the longest vector that enters."""
    np.testing.assert_allclose(got, expected, rtol=0.0, atol=1e-13 * max(norm(x) for x in (expected, *sizes)))


@bounded
@given(regular_pairs, weights, weights)
def test_pcgrad_always_projects(p: Pair, forget: float, retain: float) -> None:
    """v = λ_r r − λ_f (I − P_r) f, also where f and r do not conflict."""
    v = dense(PCGrad(forget_weight=forget, retain_weight=retain).outer(gram_of(p.vectors), None), p.vectors)
    close(v, retain * p.r - forget * without(p.f, p.r), forget * p.f, retain * p.r)


@bounded
@given(regular_pairs, weights, weights)
def test_original_pcgrad_projects_both_and_only_in_conflict(p: Pair, forget: float, retain: float) -> None:
    """Tasks −f and r: each loses its component along the other iff their inner product is negative."""
    tasks = [-forget * p.f, retain * p.r]
    if float(p.f @ p.r) > 0.0:
        tasks = [-forget * without(p.f, p.r), retain * without(p.r, p.f)]
    v = dense(PCGradConflict(forget_weight=forget, retain_weight=retain).outer(gram_of(p.vectors), None), p.vectors)
    close(v, tasks[0] + tasks[1], forget * p.f, retain * p.r)


@bounded
@given(regular_pairs, weights, weights)
def test_blur_gives_forgetting_the_right_of_way(p: Pair, forget: float, retain: float) -> None:
    """v = λ_r (I − P_f) r − λ_f f; along f it is −λ_f f exactly."""
    v = dense(Blur(forget_weight=forget, retain_weight=retain).outer(gram_of(p.vectors), None), p.vectors)
    close(v, retain * without(p.r, p.f) - forget * p.f, forget * p.f, retain * p.r)


@pytest.mark.parametrize("rule", [PCGrad(), PCGradConflict(), Blur()])
def test_a_vanishing_gradient_is_projected_by_nothing(rule: PCGrad | PCGradConflict | Blur) -> None:
    """With f = 0 or r = 0 what is left is the other one."""
    for zero, other in (("f", "r"), ("r", "f")):
        gram = Gram({(zero, zero): 0.0, (zero, other): 0.0, (other, other): 4.0})
        v = rule.outer(gram, None)
        assert v[other] == (1.0 if other == "r" else -1.0)


@bounded
@given(regular_pairs, seeds, scales, radii)
def test_forms_of_uam(p: Pair, seed: int, scale: float, rho: float) -> None:
    """Relaxed: min–max's transport without amplification. Reflected: s − γ P_f s."""
    s = scale * np.random.default_rng([11, seed]).normal(size=p.r.size)
    vectors = {**p.vectors, "s": s}
    gram = gram_of(vectors)
    relaxed = UamRelaxed(eps_q=0.0)
    assert relaxed.outer(gram, relaxed.inner(gram, rho)) == MinMax(eps_q=0.0).outer(gram, relaxed.inner(gram, rho))
    assert not relaxed.pulls
    for gamma in (0.0, 1.0, 2.0):
        rule = UamReflected(eps_q=0.0, reflection=gamma)
        v = dense(rule.outer(gram, rule.inner(gram, rho)), vectors)
        close(v, s - gamma * (s - without(s, p.f)), s)
        assert not rule.pulls


@bounded
@given(regular_pairs, seeds, weights, weights, radii)
def test_sharpness_aware_takes_the_forget_gradient_at_its_worst_point(
    p: Pair, seed: int, forget: float, retain: float, rho: float
) -> None:
    """δ = −ρ f/‖f‖ lowers L_f the fastest; v = λ_r r − λ_f s with s the forget gradient there."""
    s = np.random.default_rng([12, seed]).normal(size=p.r.size)
    vectors = {**p.vectors, "s": s}
    rule, gram = SharpnessAware(forget_weight=forget, retain_weight=retain, eps_q=0.0), gram_of(vectors)
    inner = rule.inner(gram, rho)
    delta = dense(inner.delta, vectors)
    close(delta, -rho * p.f / norm(p.f))
    close(dense(rule.outer(gram, inner), vectors), retain * p.r - forget * s, retain * p.r, forget * s)
    assert rule.surrogate == "forget"
    assert not rule.pulls


def test_sharpness_aware_without_a_forget_gradient_is_plain_descent() -> None:
    gram = Gram({("f", "f"): 1e-14, ("f", "r"): 0.0, ("r", "r"): 1.0})
    rule = SharpnessAware()
    inner = rule.inner(gram, 0.4)
    assert inner.fallback
    assert rule.outer(gram, inner) == R - F


@pytest.mark.parametrize("method", ["pcgrad", "pcgrad_conflict", "blur", "sam_npo", "torchjd.UPGrad"])
def test_negative_weights_are_refused(method: str) -> None:
    with pytest.raises(ConfigError, match=r"forget_weight=-1\.0 must be a number"):
        build_rule(method, forget_weight=-1.0)


def test_a_negative_reflection_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reflection=-1\.0"):
        build_rule("uam_reflected", reflection=-1.0)


class TestTorchJD:
    """The weightings of the package, applied to the Gram matrix of −λ_f f and λ_r r."""

    pytest.importorskip("torchjd")

    @bounded
    @given(regular_pairs)
    def test_its_pcgrad_is_ours(self, p: Pair) -> None:
        gram = gram_of(p.vectors)
        theirs = dense(build_rule("torchjd.PCGrad").outer(gram, None), p.vectors)
        close(theirs, dense(PCGradConflict().outer(gram, None), p.vectors), p.f, p.r)

    def test_mgda_is_the_shortest_combination(self) -> None:
        """min over c ∈ [0,1] of ‖−c f + (1−c) r‖², in closed form."""
        f, r = np.array([2.0, 0.0]), np.array([0.5, 1.0])
        best = float(np.clip((r @ (r + f)) / ((r + f) @ (r + f)), 0.0, 1.0))
        v = dense(build_rule("torchjd.MGDA").outer(gram_of({"f": f, "r": r}), None), {"f": f, "r": r})
        np.testing.assert_allclose(v, -best * f + (1.0 - best) * r, atol=1e-6)  # theirs is iterative

    def test_upgrad_conflicts_with_neither_task(self) -> None:
        f, r = np.array([2.0, 0.0]), np.array([0.5, 1.0])
        v = dense(build_rule("torchjd.UPGrad").outer(gram_of({"f": f, "r": r}), None), {"f": f, "r": r})
        assert v @ -f >= -1e-9
        assert v @ r >= -1e-9

    @pytest.mark.parametrize("name", ["torchjd.Random", "torchjd.CAGrad", "torchjd.upgrad", "torchjd."])
    def test_what_is_not_a_function_of_the_gram_matrix_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigError, match=r"it is not one of torchjd\.AlignedMTL"):
            build_rule(name)
