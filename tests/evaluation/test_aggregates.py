"""Scores against values worked out by hand."""

from __future__ import annotations

from fractions import Fraction
from math import inf, nan

import pytest

from rosu_llm.errors import ConfigError, DataError
from rosu_llm.evaluation.tofu.summary import AUC_TRANSFORMS, auc_closeness, harmonic_mean


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5], 0.5),
        ([1.0, 1.0, 1.0], 1.0),
        ([0.5, 1.0], 2 / 3),
        ([0.25, 0.5, 1.0], 3 / 7),
        ([2.0, 6.0], 3.0),
        ([0.0], 0.0),
        ([0.0, 1.0], 0.0),
        ([0.9, 0.0, 0.9, 0.9], 0.0),
        ([5e-324, 1.0], 0.0),
        ([1e-300, 1.0], 2e-300),
    ],
)
def test_the_harmonic_mean_and_its_zero_rule(values: list[float], expected: float) -> None:
    assert harmonic_mean(values) == pytest.approx(expected, rel=1e-15, abs=0)


def test_the_harmonic_mean_is_that_of_exact_arithmetic_in_any_order() -> None:
    values = [0.31, 0.77, 0.049, 0.9993, 0.5]
    truth = float(len(values) / sum(1 / Fraction(value) for value in values))
    assert harmonic_mean(values) == pytest.approx(truth, rel=1e-15)
    assert harmonic_mean(iter(values[::-1])) == pytest.approx(truth, rel=1e-15)


@pytest.mark.parametrize("values", [[], [-0.1, 0.5], [nan], [0.5, inf], [0.0, nan]])
def test_what_has_no_harmonic_mean_is_refused(values: list[float]) -> None:
    with pytest.raises(DataError, match="harmonic mean"):
        harmonic_mean(values)


@pytest.mark.parametrize(
    ("transform", "auc", "retain", "target", "expected"),
    [
        ("range", 0.4, 0.4, None, 1.0),
        ("range", 0.7, 0.4, None, 0.5),  # 1 − .3/.6
        ("range", 0.1, 0.4, None, 0.5),
        ("range", 1.0, 0.4, None, 0.0),
        ("range", 0.99, 0.4, None, 1 / 60),  # 1 − .59/.6
        ("range", 0.35, 0.7, None, 0.5),  # 1 − .35/.7: the larger side counts
        ("range", 1.0, 0.0, None, 0.0),
        ("privleak", 0.3, 0.4, None, 0.75),
        ("privleak", 0.9, 0.4, None, 0.0),  # clipped: −.25
        ("privleak", 0.0, 0.4, None, 0.0),
        ("privleak", 0.1, 0.0, None, 0.0),  # no scale: only equality scores
        ("privleak", 0.0, 0.0, None, 1.0),
        ("span", 0.6, 0.4, 0.9, 0.6),  # 1 − .2/.5
        ("span", 0.2, 0.4, 0.9, 0.6),
        ("span", 0.9, 0.4, 0.9, 0.0),
        ("span", 0.0, 0.4, 0.5, 0.0),  # clipped
        ("span", 0.5, 0.4, 0.4, 0.0),  # no scale
        ("span", 0.4, 0.4, 0.4, 1.0),
    ],
)
def test_closeness(transform: str, auc: float, retain: float, target: float | None, expected: float) -> None:
    assert auc_closeness(auc, retain, transform=transform, target=target) == pytest.approx(expected, abs=1e-12)


def test_range_is_the_default() -> None:
    assert auc_closeness(0.7, 0.4) == auc_closeness(0.7, 0.4, transform="range") != 0.25


@pytest.mark.parametrize("transform", AUC_TRANSFORMS)
def test_every_transform_is_one_at_the_retain_model_and_falls_with_the_distance(transform: str) -> None:
    scores = [auc_closeness(0.3 + step / 20, 0.3, transform=transform, target=0.95) for step in range(15)]
    assert scores[0] == 1
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)


def test_bad_aucs_and_transforms_are_refused() -> None:
    with pytest.raises(DataError, match=r"between 0 and 1, not at 1\.2"):
        auc_closeness(1.2, 0.4)
    with pytest.raises(DataError, match="between 0 and 1, not at nan"):
        auc_closeness(0.4, nan)
    with pytest.raises(ConfigError, match="'span' needs the initial model"):
        auc_closeness(0.5, 0.4, transform="span")
    with pytest.raises(ConfigError, match="Did you mean 'range'"):
        auc_closeness(0.5, 0.4, transform="rnage")
