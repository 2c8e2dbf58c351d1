"""Methods without a surrogate point: GradDiff, FT and NG (§2.1) are fixed combinations of f and r."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rosu_llm.geometry import F, R
from rosu_llm.geometry.methods.graddiff import FineTune, GradDiff, NegativeGradient

from .problems import EPS, Pair, bounded, dense, gram_of, norm, pair, regular_pairs

weights = st.floats(0.0, 100.0)


@bounded
@given(regular_pairs, weights, weights)
def test_graddiff_raises_forget_and_lowers_retain(p: Pair, forget: float, retain: float) -> None:
    """v = λ_r r − λ_f f."""
    v = dense(GradDiff(forget_weight=forget, retain_weight=retain).outer(gram_of(p.vectors), None), p.vectors)
    allowed = 4 * EPS * (forget * norm(p.f) + retain * norm(p.r))  # two products and a sum per entry
    assert norm(v - (retain * p.r - forget * p.f)) <= allowed


def test_graddiff_weights_default_to_one() -> None:
    """v = r − f."""
    assert GradDiff().outer(gram_of(pair("random").vectors), None) == R - F


def test_fine_tuning_is_retain_descent() -> None:
    """v = r, and the forget gradient is never asked for."""
    rule = FineTune()
    assert rule.outer(gram_of({"r": np.ones(2)}), None) == R
    assert rule.passes == ("retain",)


def test_negative_gradient_is_forget_ascent() -> None:
    """v = −f, and the retain gradient is never asked for."""
    rule = NegativeGradient()
    assert rule.outer(gram_of({"f": np.ones(2)}), None) == -F
    assert rule.passes == ("forget",)


@pytest.mark.parametrize("rule", [GradDiff(), FineTune(), NegativeGradient()])
def test_descent_has_no_surrogate_point(rule: GradDiff | FineTune | NegativeGradient) -> None:
    """No perturbation, no amplification; asking for δ is an error that names the method."""
    assert not rule.perturbs
    assert not rule.pulls
    with pytest.raises(TypeError, match=type(rule).__name__):
        rule.inner(gram_of(pair("random").vectors), 0.4)


def test_graddiff_captures_both_gradients() -> None:
    """Forget before retain."""
    assert GradDiff().passes == ("forget", "retain")
