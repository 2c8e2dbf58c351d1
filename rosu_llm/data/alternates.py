"""Plausible wrong answers to the questions of a data set, for ``forget_until: alternates``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from ..errors import DataError
from .sources import Pairs, text_of

#: How many answers to similar questions stand in for alternates.
NEIGHBOURS = 5


def listed_alternates(
    rows: Sequence[Mapping[str, Any]], source: str, alternates_key: str, question_key: str = "question"
) -> list[Pairs]:
    """The question of every row with each of the wrong answers that the row lists."""
    found: list[Pairs] = []
    for number, row in enumerate(rows, 1):
        where = f"Row {number} of {source!r}"
        given = row.get(alternates_key)
        answers = [given] if isinstance(given, str) else given
        if not isinstance(answers, list) or not answers or question_key not in row:
            raise DataError(
                f"{where} has fields {sorted(row)}, but no {question_key!r} with a list of answers as "
                f"{alternates_key!r}: name the field with alternates_key, or leave that out to take answers of "
                "retain_data."
            )
        question = text_of(row, question_key, where)
        numbered = [{alternates_key: answer} for answer in answers]
        found.append([(question, text_of(one, alternates_key, where, filled=True)) for one in numbered])
    return found


def nearest_alternates(forget: Pairs, retain: Pairs) -> list[Pairs]:
    """Every forget question with the answers to the retain questions that share most of their words with it.

    Among equals each question draws its own: by their order, the same five would stand for all questions of a kind.
    """
    known = [(_words(question), answer) for question, answer in retain]
    found: list[Pairs] = []
    for question, answer in forget:
        words = _words(question)
        likeness = [(len(words & other) / max(1, len(words | other)), text) for other, text in known if text != answer]
        best = sorted(likeness, key=lambda pair: (-pair[0], crc32(f"{question} {pair[1]}".encode())))[:NEIGHBOURS]
        if not best:
            raise DataError("No retain row has another answer than the forget row: there is nothing to compare with.")
        found.append([(question, text) for _, text in best])
    return found


def _words(question: str | None) -> frozenset[str]:
    if question is None:
        raise DataError(
            "forget_until: alternates compares answers to questions, and there are rows of plain text: use 'holdout', "
            "'base' or a target loss."
        )
    return frozenset(question.lower().split())
