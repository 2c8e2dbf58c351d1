"""Stabilizer: the τ in force, the denominator ‖r‖²+τ and the residue τ/(‖r‖²+τ) in both modes (Lemma 2)."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rosu_llm.geometry import Stabilizer

from .problems import EPS, bounded

squares = st.integers(-24, 24).map(lambda exponent: 10.0**exponent)
taus = st.integers(-12, 2).map(lambda exponent: 10.0**exponent)


@bounded
@given(squares, taus)
def test_absolute_tau_is_added_as_it_is(square: float, tau: float) -> None:
    """amount = τ, denominator = ‖r‖² + τ, residue = τ/(‖r‖² + τ)."""
    stabilizer = Stabilizer(tau)
    assert stabilizer.amount(square) == tau
    assert stabilizer.denominator(square) == square + tau
    assert stabilizer.residue(square) == pytest.approx(1.0 / (1.0 + square / tau), rel=8 * EPS)  # three roundings


@bounded
@given(squares, taus)
def test_relative_tau_is_a_share_of_the_retain_norm(square: float, tau: float) -> None:
    """amount = τ‖r‖²; the residue τ/(1 + τ) is the same for every ‖r‖."""
    stabilizer = Stabilizer(tau, "relative")
    assert stabilizer.amount(square) == pytest.approx(tau * square, rel=4 * EPS)  # one product
    assert stabilizer.denominator(square) == pytest.approx((1.0 + tau) * square, rel=8 * EPS)  # three roundings
    assert stabilizer.residue(square) == pytest.approx(tau / (1.0 + tau), rel=8 * EPS)  # likewise


@pytest.mark.parametrize("mode", ["absolute", "relative"])
@pytest.mark.parametrize("square", [1e-24, 1.0, 1e24])
def test_tau_zero_is_the_exact_projector(mode: str, square: float) -> None:
    """τ = 0 leaves no residue and the plain denominator."""
    assert Stabilizer(0.0, mode).denominator(square) == square
    assert Stabilizer(0.0, mode).residue(square) == 0.0


@pytest.mark.parametrize(("tau", "mode"), [(0.0, "absolute"), (0.0, "relative"), (1e-8, "relative")])
def test_vanishing_retain_gradient_without_tau(tau: float, mode: str) -> None:
    """0/0 is avoided: the denominator is infinite, every quotient zero, and everything is residue."""
    assert Stabilizer(tau, mode).denominator(0.0) == inf
    assert Stabilizer(tau, mode).residue(0.0) == 1.0


def test_vanishing_retain_gradient_with_tau() -> None:
    """The same residue 1 by the formula τ/τ."""
    assert Stabilizer(1e-8).denominator(0.0) == 1e-8
    assert Stabilizer(1e-8).residue(0.0) == 1.0


@pytest.mark.parametrize("ratio", [1e-3, 1.0, 1e3])
def test_protection_fades_where_the_retain_gradient_is_of_the_size_of_tau(ratio: float) -> None:
    """At ‖r‖² = ratio·τ the residue is 1/(1 + ratio): half at equality."""
    assert Stabilizer(1e-8).residue(ratio * 1e-8) == pytest.approx(1.0 / (1.0 + ratio), rel=8 * EPS)  # as above


def test_default_is_that_of_the_paper() -> None:
    """τ = 10⁻⁸, absolute (§2.2)."""
    assert Stabilizer() == Stabilizer(1e-8, "absolute")
