"""Gram: inner products of combinations, and the direct measurement where the expansion cancels."""

from __future__ import annotations

from math import isnan, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf

from rosu_llm.geometry import F, Gram, R, Vector

from .problems import EPS, Dense, bounded, gram_of, norm, pair, scales, seeds

coefficients = st.floats(-10.0, 10.0).map(lambda value: round(value, 6))  # no subnormal numbers


def exact_product(x: Vector, y: Vector, vectors: dict[str, Dense]) -> mpf:
    """⟨x, y⟩ of the dense combinations in 60-digit arithmetic."""
    with mp.workdps(60):
        dim = next(iter(vectors.values())).size
        left = [sum((mpf(x[n]) * mpf(float(vectors[n][i])) for n in x), mpf(0)) for i in range(dim)]
        right = [sum((mpf(y[n]) * mpf(float(vectors[n][i])) for n in y), mpf(0)) for i in range(dim)]
        return sum((a * b for a, b in zip(left, right, strict=True)), mpf(0))


class Counting:
    """A measurement that answers a fixed number and counts how often it was asked."""

    def __init__(self, answer: float) -> None:
        self.answer, self.calls = answer, 0

    def __call__(self, x: Vector, y: Vector) -> float:
        self.calls += 1
        return self.answer


def collinear_units(measure: Counting | None = None) -> Gram:
    """f = r of norm 1, so that ‖f − k r‖² = (1 − k)² is known."""
    return Gram({("f", "f"): 1.0, ("f", "r"): 1.0, ("r", "r"): 1.0}, measure)


@bounded
@given(seeds, scales, scales, coefficients, coefficients, coefficients, coefficients)
def test_expansion_is_the_inner_product(
    seed: int, f_scale: float, r_scale: float, a: float, b: float, c: float, d: float
) -> None:
    """gram(x, y) = ⟨x, y⟩ and is symmetric, at any two scales."""
    p = pair("random", seed, 5, f_scale, r_scale)
    x, y = a * F + b * R, c * F + d * R
    gram = gram_of(p.vectors)
    size = (abs(a) * norm(p.f) + abs(b) * norm(p.r)) * (abs(c) * norm(p.f) + abs(d) * norm(p.r))
    slack = 16 * EPS * size  # rounding of the products and of four terms
    assert abs(gram(x, y) - float(exact_product(x, y, p.vectors))) <= slack
    assert abs(gram(x, y) - gram(y, x)) <= slack


def test_pairs_may_be_keyed_either_way_round() -> None:
    """⟨f, r⟩ stored under (r, f) is found as (f, r)."""
    one = Gram({("f", "f"): 2.0, ("f", "r"): 3.0, ("r", "r"): 5.0})
    other = Gram({("f", "f"): 2.0, ("r", "f"): 3.0, ("r", "r"): 5.0})
    for x, y in ((F, R), (R, F), (F - R, F + 2.0 * R)):
        assert one(x, y) == other(x, y)
    assert one(F - R, F - R) == 1.0  # 2 − 6 + 5


def test_a_pair_that_was_never_captured_is_an_error() -> None:
    """A missing product is not taken for zero."""
    with pytest.raises(KeyError):
        Gram({("f", "f"): 1.0})(F, R)


@pytest.mark.parametrize("kind", ["parallel 1e-6", "parallel 1e-12", "opposed 1e-6", "opposed 1e-12"])
@pytest.mark.parametrize("seed", range(5))
def test_measured_norm_keeps_its_digits_where_the_expansion_loses_them(kind: str, seed: int) -> None:
    """‖f − k r‖² against 60 digits: measured to EPS/sin θ, expanded only to EPS/sin²θ (text of gram)."""
    p = pair(kind, seed)
    q = F - (1.0 if p.cosine > 0 else -1.0) * R
    truth = exact_product(q, q, p.vectors)
    measured = gram_of(p.vectors).squared_norm(q)
    # Forming f − k r rounds each entry once at the size of f; the square doubles the relative error.
    assert abs(measured / truth - 1) <= 32 * EPS / p.sine
    expanded = gram_of(p.vectors, measured=False).squared_norm(q)
    # Four terms of size ‖f‖² leave an error of that size over ‖q‖² = ‖f‖² sin²θ.
    assert abs(expanded / truth - 1) <= 32 * EPS / p.sine**2


def test_expansion_alone_visibly_fails_where_the_measurement_does_not() -> None:
    """At cos θ = 1 − 10⁻¹² the expansion is wrong in the sixth digit or before: the guard has a purpose."""
    worst_expanded = worst_measured = 0.0
    for seed in range(20):
        p = pair("parallel 1e-12", seed)
        truth = exact_product(F - R, F - R, p.vectors)
        expanded = gram_of(p.vectors, measured=False).squared_norm(F - R)
        measured = gram_of(p.vectors).squared_norm(F - R)
        worst_expanded = max(worst_expanded, float(abs(expanded / truth - 1)))
        worst_measured = max(worst_measured, float(abs(measured / truth - 1)))
    # EPS/sin²θ ≈ 1e-4 against EPS/sin θ ≈ 2e-10: five orders apart, so both limits are far from either.
    assert worst_expanded > 1e-6
    assert worst_measured < 1e-8


@pytest.mark.parametrize(("k", "cancelled"), [(0.0, False), (0.5, False), (0.81, False), (0.98, True), (1.0, True)])
def test_cancels_means_three_digits_lost(k: float, cancelled: bool) -> None:
    """(1−k)² out of terms (1+k)²: 1 % left at k = 0.81 is fine, 0.01 % left at k = 0.98 is not."""
    assert collinear_units().cancels(F - k * R) is cancelled


def test_cancels_does_not_depend_on_scale() -> None:
    """Cancellation is a ratio: multiplying every gradient or the combination changes nothing."""
    for scale in (1e-12, 1.0, 1e12):
        p = pair("parallel 1e-6", f_scale=scale, r_scale=scale)
        gram = gram_of(p.vectors)
        assert gram.cancels(F - R)
        assert gram.cancels(1e9 * (F - R))
        assert not gram.cancels(F + R)
        assert not gram.cancels(F)


def test_norm_is_measured_exactly_when_the_expansion_cancels() -> None:
    """The extra pass over the parameters is paid only where it is needed, and then its answer is used."""
    measure = Counting(0.25)
    gram = collinear_units(measure)
    assert gram.squared_norm(F - 0.5 * R) == 0.25
    assert measure.calls == 0
    assert gram.squared_norm(F - 0.999 * R) == 0.25
    assert measure.calls == 1
    assert gram.norm(F - 0.999 * R) == 0.5
    assert measure.calls == 2


def test_dot_is_measured_exactly_when_the_expansion_cancels() -> None:
    """The same for ⟨x, y⟩; without a measurement the expansion is returned, sign included."""
    measure = Counting(7.0)
    gram = collinear_units(measure)
    assert gram.dot(F, R) == 1.0
    assert measure.calls == 0
    assert gram.dot(F - R, R) == 7.0
    assert measure.calls == 1
    assert collinear_units().dot(F - 1.0001 * R, R) == pytest.approx(-1e-4, rel=1e-11)  # EPS / 1e-4


def test_squared_norm_is_never_negative() -> None:
    """Rounding in the Gram matrix may push ‖f − r‖² below zero; the norm is then 0, not an error."""
    gram = Gram({("f", "f"): 1.0, ("f", "r"): 1.0 + 1e-12, ("r", "r"): 1.0})
    assert gram(F - R, F - R) < 0.0
    assert gram.squared_norm(F - R) == 0.0
    assert gram.norm(F - R) == 0.0


def test_a_broken_gradient_is_not_mistaken_for_a_vanishing_one() -> None:
    """NaN in the Gram matrix stays NaN: it must not read as norm 0, which means 'fall back quietly'."""
    gram = Gram({("f", "f"): float("nan"), ("f", "r"): 1.0, ("r", "r"): 1.0})
    assert isnan(gram.squared_norm(F))
    assert isnan(gram.norm(F - R))


def test_norm_is_the_root_of_the_squared_norm() -> None:
    """‖3f‖ = 3‖f‖, and the empty combination has norm 0."""
    gram = Gram({("f", "f"): 2.0})
    assert gram.squared_norm(3.0 * F) == 18.0
    assert gram.norm(3.0 * F) == sqrt(18.0)
    assert gram.norm(Vector()) == 0.0
