"""leak@k and bootstrap intervals. Pure arithmetic.

Of n samples of an answer, c are hits. The chance that k of them, drawn without repetition, hold one is

    leak@k = 1 − C(n−c, k) / C(n, k)

which is unbiased for the chance that k fresh samples leak (1 − (1 − c/n)^k is not). For scores s₍₁₎ ≤ … ≤ s₍ₙ₎ in place
of hits the expected best of k is Σᵢ s₍ᵢ₎ C(i−1, k−1) / C(n, k); for hits it is the same number.

An interval is that of the percentile bootstrap over questions, pairs kept together: the same question was put to both
models.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import NamedTuple

import numpy as np

from ...errors import ConfigError

RESAMPLES = 2000


class Interval(NamedTuple):
    """A mean and the bounds of its interval."""

    mean: float
    low: float
    high: float


def check_samples(ks: Sequence[int], samples: int) -> None:
    """Raise for a k that no n samples can tell."""
    if samples < 1:
        raise ConfigError(f"--samples {samples} must be at least 1.")
    for k in ks:
        if not 1 <= k <= samples:
            raise ConfigError(
                f"--k {k} needs at least {max(k, 1)} samples of every answer and --samples is {samples}: leak@k is "
                "estimated from k of them. Raise --samples, or leave the larger k out."
            )


def leak_at(hits: int, samples: int, k: int) -> float:
    """leak@k; valid for 1 ≤ k ≤ n, exact integers inside."""
    return 1.0 - comb(samples - hits, k) / comb(samples, k)


def expected_best(scores: Sequence[float], k: int) -> float:
    """The expected largest of k scores drawn from these without repetition."""
    total = comb(len(scores), k)
    ordered = sorted(scores)
    return sum(score * (comb(place, k - 1) / total) for place, score in enumerate(ordered) if place >= k - 1)


def bootstrap(values: Sequence[float], seed: int, *, level: float = 0.95, resamples: int = RESAMPLES) -> Interval:
    """Mean of ``values``, one per question, and its interval; both bounds are the mean where all values are equal."""
    numbers = np.asarray(values, dtype=np.float64)
    means = bootstrap_means(numbers, seed, resamples)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(numbers.mean()), float(low), float(high))


def bootstrap_means(values: Sequence[float] | np.ndarray, seed: int, resamples: int = RESAMPLES) -> np.ndarray:  # type: ignore[type-arg]
    """The means of as many questions drawn with repetition, ``resamples`` times."""
    numbers = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, len(numbers), (resamples, len(numbers)))
    found: np.ndarray = numbers[draws].mean(1)  # type: ignore[type-arg]
    return found
