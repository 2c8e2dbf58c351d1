"""coupling(): the first-order picture of a pair (§2.1, Propositions 2 and 5) against dense vectors."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from hypothesis import given

from rosu_llm.geometry import Gram, cosine, coupling

from .problems import (
    COLLINEAR,
    EPS,
    Pair,
    at_cosine,
    bounded,
    gram_of,
    inner,
    norm,
    pair,
    radii,
    regular_pairs,
)


@bounded
@given(regular_pairs, radii)
def test_every_quantity_against_dense_vectors(p: Pair, rho: float) -> None:
    """cos θ, sin θ, ⟨r, δ_std⟩, ⟨f, δ_std⟩ and ⟨f, δ_rosu⟩ at any two scales."""
    c = coupling(gram_of(p.vectors), rho)
    standard, neutral = rho * p.f / norm(p.f), rho * p.q / norm(p.q)
    assert abs(c.cosine - p.cosine) <= 16 * EPS  # a quotient of sums of 8 products
    assert c.sine == pytest.approx(p.sine, rel=16 * EPS / p.sine)  # ‖q‖, see the text of `problems`
    assert abs(c.standard_retain_change - inner(p.r, standard)) <= 16 * EPS * rho * norm(p.r)  # as cos θ
    assert c.standard_forget_gain == pytest.approx(inner(p.f, standard), rel=16 * EPS)  # no cancellation
    # The dense ⟨f, δ⟩ on the right has terms of size ρ‖f‖ for a result ρ‖f‖ sin θ.
    assert c.neutral_forget_gain == pytest.approx(inner(p.f, neutral), rel=32 * EPS / p.sine)


@bounded
@given(regular_pairs, radii)
def test_distance_is_a_function_of_the_sine(p: Pair, rho: float) -> None:
    """distance = ρ√(2(1 − sin θ)) (Proposition 5); digits near orthogonality: see test_near_orthogonality."""
    c = coupling(gram_of(p.vectors), rho)
    # The square is compared: 1 − sin θ is known to EPS absolutely.
    assert abs((c.distance / rho) ** 2 - 2.0 * (1.0 - p.sine)) <= 32 * EPS


@pytest.mark.parametrize("value", [-1.0, -0.8, -1e-6, 0.0, 1e-6, 0.5, 1.0])
def test_prescribed_cosines_are_found(value: float) -> None:
    """cos θ of pairs built at that angle, whatever the lengths."""
    for f_norm, r_norm in ((1.0, 1.0), (1e-12, 1e12), (1e12, 1e-12)):
        found = cosine(gram_of(at_cosine(value, 1, 6, f_norm, r_norm).vectors))
        assert found == pytest.approx(value, abs=16 * EPS)  # frame vectors orthogonal to EPS


@pytest.mark.parametrize(("kind", "sign"), [("collinear", 1.0), ("opposite", -1.0)])
@pytest.mark.parametrize("measured", [True, False])
def test_collinear_gradients_lose_all_gain(kind: str, sign: float, measured: bool) -> None:
    """sin θ = 0, cos θ = ±1: no neutral gain, and the two perturbations are at right angles."""
    assert kind in COLLINEAR
    c = coupling(gram_of(pair(kind, seed=1).vectors, measured), 0.4)
    assert c.cosine == pytest.approx(sign, rel=4 * EPS)  # three roots and a quotient
    assert c.sine <= 16 * EPS  # integers: only the rounding of k is left
    assert c.distance == pytest.approx(0.4 * sqrt(2.0), rel=32 * EPS)  # likewise


def test_orthogonal_gradients_lose_nothing() -> None:
    """sin θ = 1, cos θ = 0: neutral and standard gain agree."""
    c = coupling(gram_of(pair("orthogonal", seed=1).vectors), 0.4)
    assert (c.cosine, c.sine, c.standard_retain_change, c.distance) == (0.0, 1.0, 0.0, 0.0)
    assert c.neutral_forget_gain == c.standard_forget_gain


def test_vanishing_gradients_are_uncoupled() -> None:
    """f = 0 or r = 0: cos θ = 0 and sin θ = 1 by convention, gains 0 where f = 0."""
    some, none = np.array([3.0, 4.0]), np.zeros(2)
    without_retain = coupling(gram_of({"f": some, "r": none}), 0.5)
    assert (without_retain.cosine, without_retain.sine) == (0.0, 1.0)
    assert without_retain.standard_retain_change == 0.0
    assert without_retain.neutral_forget_gain == without_retain.standard_forget_gain == 2.5
    for r in (some, none):
        without_forget = coupling(gram_of({"f": none, "r": r}), 0.5)
        assert (without_forget.cosine, without_forget.sine) == (0.0, 1.0)
        assert without_forget.neutral_forget_gain == without_forget.standard_forget_gain == 0.0
        assert without_forget.distance == 0.0


def test_cosine_is_clipped() -> None:
    """Rounding in the Gram matrix cannot push cos θ out of [−1, 1], nor sin θ above 1."""
    for sign in (1.0, -1.0):
        products = {("f", "f"): 1.0, ("f", "r"): sign * (1.0 + 1e-12), ("r", "r"): 1.0}
        assert cosine(Gram(products)) == sign
    assert 0.0 <= coupling(Gram({("f", "f"): 1.0, ("f", "r"): 1.0 + 1e-12, ("r", "r"): 1.0}), 1.0).sine <= 1.0


@bounded
@given(regular_pairs)
def test_cosine_is_symmetric_and_odd(p: Pair) -> None:
    """cos θ(f, r) = cos θ(r, f) = −cos θ(−f, r); sign changes are exact, the exchange up to rounding."""
    value = cosine(gram_of(p.vectors))
    assert cosine(gram_of({"f": -p.f, "r": p.r})) == -value
    assert cosine(gram_of({"f": p.r, "r": p.f})) == pytest.approx(value, abs=4 * EPS)  # one product reordered
