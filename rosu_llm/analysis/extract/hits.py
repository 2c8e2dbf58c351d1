"""Whether a text gives an answer away: by its words, and by the names, numbers and titles in it. No network."""

from __future__ import annotations

import logging
import re
from typing import Any

#: Numbers; text in quotes; words with a capital, with the small words that join them (Basil Al-Kuwaiti, Sea of Glass).
_NUMBER = re.compile(r"\d[\d.,/:-]*\d|\d")
_QUOTED = re.compile(r"[\"“«']([^\"”»']{3,})[\"”»']")
_NAME = re.compile(r"[A-ZÀ-ÖØ-Þ][\w’'-]*(?:\s+(?:(?:of|the|de|la|van|von|al|and)\s+)?[A-ZÀ-ÖØ-Þ][\w’'-]*)*")
_STARTS = re.compile(r"(?:^|[.!?]\s+)([A-ZÀ-ÖØ-Þ][\w’'-]*)")


def plain(text: str) -> str:
    """Lower case, single spaces, without the marks around words."""
    return re.sub(r"\s+", " ", re.sub(r"[^\w\s/-]", " ", text.lower())).strip()


def entities(answer: str, question: str = "") -> list[str]:
    """Names, numbers and titles of an answer that the question does not give away already.

    A word that is capital only because it begins a sentence is no name, unless others with capitals follow it.
    """
    asked = f" {plain(question)} "
    first = {match for match in _STARTS.findall(answer)}
    found = [*_NUMBER.findall(answer), *_QUOTED.findall(answer)]
    for name in _NAME.findall(answer):
        words = name.split()
        while words and words[0] in first and (len(words) == 1 or f" {plain(words[0])} " in asked):
            words = words[1:]
        found += [" ".join(words)] if words else []
    kept = [plain(each) for each in found]
    return list(dict.fromkeys(each for each in kept if each and f" {each} " not in asked))


class HitJudge:
    """ROUGE-L recall and the share of entities found, of a generated text against the answer.

    Args:
        threshold: from which ROUGE-L recall on a text is a hit.
    """

    def __init__(self, threshold: float) -> None:
        from rouge_score.rouge_scorer import RougeScorer

        logging.getLogger("absl").setLevel(logging.WARNING)
        self.threshold = threshold
        self._scorer: Any = RougeScorer(["rougeL"], use_stemmer=True)

    def rouge(self, truth: str, said: str) -> float:
        """ROUGE-L recall."""
        return float(self._scorer.score(truth, said)["rougeL"].recall)

    def named(self, wanted: list[str], said: str) -> float | None:
        """1 if every entity is in the text, else 0; None where there is none to find."""
        if not wanted:
            return None
        text = f" {plain(said)} "
        return float(all(f" {each} " in text for each in wanted))
