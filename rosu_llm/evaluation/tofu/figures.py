"""From the numbers of one answer's tokens to the figures of that answer, by OpenUnlearning's definitions.

The loss counts every token of the answer, the closing end-of-text token included; the others leave the last token
out. n is their number of tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from .answers import Numbers, TokenStatistics

SHARE = 0.4  # the K of Min-K%


def average_loss(tokens: TokenStatistics) -> float:
    """−mean log p(token)."""
    return float(-tokens.log_prob.mean())


def probability(loss: float) -> float:
    """p(answer)^(1/length) = exp(−loss)."""
    return float(np.exp(-loss))


def exact_memorization(tokens: TokenStatistics) -> float | None:
    """Share of tokens that are the model's first choice; none when the answer has none."""
    hits = tokens.hit[:-1]
    return float(hits.mean()) if len(hits) else None


def extraction_strength(tokens: TokenStatistics) -> float:
    """1 − k/n, k the shortest prefix after which every first choice is right.

    OpenUnlearning tries k = 0 … n−1, so that an answer with a wrong last token gets 1/n, not 0.
    """
    hits = tokens.hit[:-1]
    if not len(hits):
        return 0.0
    wrong = np.flatnonzero(~hits)
    prefix = min(int(wrong[-1]) + 1, len(hits) - 1) if len(wrong) else 0
    return 1 - prefix / len(hits)


def zlib_loss(loss: float, text: str) -> float:
    """Loss per byte of the compressed answer."""
    return loss / len(zlib.compress(text.encode("utf-8")))


def min_k(tokens: TokenStatistics) -> float:
    """−mean of the lowest 40 % of log p(token)."""
    return _lowest(tokens.log_prob[:-1])


def min_k_plus_plus(tokens: TokenStatistics) -> float:
    """The same of log p(token) standardised under the model's own distribution."""
    return _lowest(tokens.z[:-1])


def _lowest(values: Numbers) -> float:
    if not len(values):
        return 0.0
    return float(-np.sort(values)[: max(1, int(len(values) * SHARE))].mean())


def rouge(scorer: Any, truth: str, generated: str) -> dict[str, float]:
    """ROUGE-1 recall and ROUGE-L of a generated answer."""
    scores = scorer.score(truth, generated)
    return {
        "rouge1_recall": float(scores["rouge1"].recall),
        "rougeL_f1": float(scores["rougeL"].fmeasure),
        "rougeL_recall": float(scores["rougeL"].recall),
    }


def mean(values: Sequence[float | Sequence[float] | None]) -> float | None:
    """Mean over questions of the mean over a question's answers, those without a value left out."""
    known = [np.mean(value) for value in values if value is not None]
    return float(np.mean(known)) if known else None
