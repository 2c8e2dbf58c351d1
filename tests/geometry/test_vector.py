"""Vector: combinations of named gradients form a vector space (the notation of Algorithm 1)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rosu_llm.geometry import F, R, S, Vector

from .problems import bounded, dense

NAMES = ("f", "r", "s")
#: Integers: sums and products of them are exact in float64, so every axiom is tested with ``==``.
whole = st.integers(-1000, 1000).map(float)
combinations = st.dictionaries(st.sampled_from(NAMES), whole).map(Vector)
GRADIENTS = {name: np.random.default_rng(i).integers(-9, 9, size=5).astype(float) for i, name in enumerate(NAMES)}


def values(x: Vector) -> tuple[float, ...]:
    """Coefficients in a fixed order, absent ones as 0."""
    return tuple(x[name] for name in NAMES)


@bounded
@given(combinations, combinations, combinations)
def test_addition_is_a_commutative_group(x: Vector, y: Vector, z: Vector) -> None:
    """x + y = y + x, (x + y) + z = x + (y + z), x + 0 = x, x − x = 0."""
    assert values(x + y) == values(y + x)
    assert values((x + y) + z) == values(x + (y + z))
    assert values(x + Vector()) == values(x)
    assert values(x - x) == (0.0, 0.0, 0.0)
    assert values(-x) == values(Vector() - x)


@bounded
@given(combinations, combinations, whole, whole)
def test_scaling_distributes(x: Vector, y: Vector, a: float, b: float) -> None:
    """a(x + y) = ax + ay, (a + b)x = ax + bx, and a scale may stand on either side."""
    assert values(a * (x + y)) == values(a * x + a * y)
    assert values((a + b) * x) == values(a * x + b * x)
    assert values(a * x) == values(x * a)


@bounded
@given(combinations, st.sampled_from([0.25, 0.5, 2.0, 4.0, -8.0]))
def test_division_undoes_scaling(x: Vector, a: float) -> None:
    """(ax)/a = x; powers of two, so that both sides are exact."""
    assert values((a * x) / a) == values(x)
    assert values(x / a) == values((1.0 / a) * x)


@bounded
@given(combinations, combinations, whole)
def test_operations_mean_the_same_on_dense_vectors(x: Vector, y: Vector, a: float) -> None:
    """The map from names to gradients is linear: dense(x − a y) = dense(x) − a dense(y)."""
    expected = dense(x, GRADIENTS) - a * dense(y, GRADIENTS)
    np.testing.assert_array_equal(dense(x - a * y, GRADIENTS), expected)


@pytest.mark.parametrize(("gradient", "name"), [(F, "f"), (R, "r"), (S, "s")])
def test_named_gradients_are_unit_coefficients(gradient: Vector, name: str) -> None:
    """f, r and s are their own coordinates and nothing else."""
    assert gradient.coefficients == {name: 1.0}
    assert gradient == Vector.named(name)


def test_missing_names_have_coefficient_zero() -> None:
    """A gradient that was never added has coefficient 0; only present names are iterated."""
    q = F - 2.0 * R
    assert (q["f"], q["r"], q["s"]) == (1.0, -2.0, 0.0)
    assert sorted(q) == ["f", "r"]
    assert list(Vector()) == []


def test_operations_leave_their_operands_alone() -> None:
    """Vectors are values: arithmetic builds a new one."""
    x = F + R
    _ = x + S, x - F, 3.0 * x, x / 2.0, -x
    assert x.coefficients == {"f": 1.0, "r": 1.0}
    assert F.coefficients == {"f": 1.0}


def test_numpy_scalars_scale_like_floats() -> None:
    """A float64 scalar on the left does not turn the vector into an array."""
    scaled = np.float64(3.0) * F
    assert isinstance(scaled, Vector)
    assert scaled["f"] == 3.0


def test_division_by_zero_is_an_error() -> None:
    """No silent infinities."""
    with pytest.raises(ZeroDivisionError):
        F / 0.0
