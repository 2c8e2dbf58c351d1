"""pull_factor: clip((L_target − L_forget)/margin, 0, 1), an addition to the paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rosu_llm.step.calibration import pull_factor
from tests.geometry.problems import bounded

losses = st.floats(-1e3, 1e3)
margins = st.floats(1e-3, 1e3)


@bounded
@given(losses, losses, margins)
def test_scale_is_the_clipped_gap(target: float, forget: float, margin: float) -> None:
    """0 from the target upwards, 1 a margin below it, linear in between."""
    scale = pull_factor(target, forget, margin)
    if forget >= target:
        assert scale == 0.0
    elif target - forget >= margin:
        assert scale == 1.0
    else:
        assert scale == (target - forget) / margin


@bounded
@given(losses, losses, losses, margins)
def test_scale_falls_as_the_forget_loss_rises(target: float, one: float, other: float, margin: float) -> None:
    """The higher the forget loss the weaker the pull."""
    low, high = sorted((one, other))
    assert pull_factor(target, high, margin) <= pull_factor(target, low, margin)


@pytest.mark.parametrize(
    ("forget", "expected"), [(0.0, 1.0), (1.0, 1.0), (1.5, 0.5), (1.75, 0.25), (2.0, 0.0), (9.0, 0.0)]
)
def test_scale_at_known_losses(forget: float, expected: float) -> None:
    """Target 2, margin 1: full at 1, half at 1.5, none at 2; exact in binary."""
    assert pull_factor(2.0, forget, 1.0) == expected


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_estimate_never_pulls(broken: float) -> None:
    """NaN or infinity on either side gives 0."""
    assert pull_factor(broken, 1.0, 1.0) == 0.0
    assert pull_factor(1.0, broken, 1.0) == 0.0
    assert pull_factor(broken, broken, 1.0) == 0.0
