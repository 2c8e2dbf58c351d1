"""Answers to forget questions before and after unlearning, with the words marked that agree with the true answer.

As in the paper's qualitative figure: in every answer, words that follow the true answer are marked as agreeing, other
words as differing. What the question says already and function words carry no knowledge and are left unmarked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError
from ..files import read_json

METRIC, SCORE = "forget_Q_A_ROUGE", "rougeL_recall"
AGREES, DIFFERS, PLAIN = "agrees", "differs", "plain"

LEGEND = (
    "Words that follow the true answer are marked as agreeing, others as differing; what the question says already "
    "and function words are not marked."
)
_FUNCTION_WORDS = frozenset(
    "a an and are as at be been but by for from had has have he her him his i in into is it its of on or s she "
    "that the their them these they this those to was were which who will with".split()
)
# Chat formats leave their role names in the decoded prompt once special tokens are gone.
_BEFORE_QUESTION = re.compile(r"(?:<\|)?user(?:\|>)?\s*\n|\[INST\]|(?:^|\n)Question:", re.IGNORECASE)
_AFTER_QUESTION = re.compile(r"(?:<\|)?assistant(?:\|>)?\s*$|\[/INST\]\s*$|\n\s*Answer:\s*$", re.IGNORECASE)
_WORD = re.compile(r"(\w+)")


class Answer(NamedTuple):
    """One model's answer to one question; ``score`` is its ROUGE-L recall where that was measured."""

    question: str
    truth: str
    text: str
    score: float | None = None


class Span(NamedTuple):
    """A stretch of text of one kind: ``agrees``, ``differs`` or ``plain``."""

    text: str
    kind: str


class Example(NamedTuple):
    """One question with the true answer and what each model says, in the order of the models."""

    question: str
    truth: str
    answers: tuple[tuple[str, str], ...]
    remark: str = ""


class Choice(NamedTuple):
    """The examples shown, and how they were chosen."""

    examples: tuple[Example, ...]
    how: str


def read_answers(path: Path) -> dict[str, Answer]:
    """Question number → answer, from a ``TOFU_EVAL.json`` that has generations."""
    metric = read_json(path).get(METRIC)
    entries = metric.get("value_by_index") if isinstance(metric, Mapping) else None
    if not isinstance(entries, Mapping) or not entries:
        raise DataError(f"{path} holds no generated answers ({METRIC} with value_by_index): evaluate that metric.")
    found = {}
    for key, entry in entries.items():
        parts: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
        question, truth, text = (parts.get(name) for name in ("input", "ground_truth", "generation"))
        if isinstance(question, str) and isinstance(truth, str) and isinstance(text, str):
            score = parts.get(SCORE)
            usable = float(score) if isinstance(score, int | float) and 0 <= score <= 1 else None
            found[str(key)] = Answer(question_of(question), truth.strip(), text.strip(), usable)
    return found


def question_of(prompt: str) -> str:
    """The question inside a decoded chat prompt; the prompt itself where no known format is recognised."""
    return _AFTER_QUESTION.sub("", _BEFORE_QUESTION.split(prompt)[-1]).strip() or prompt.strip()


def choose(before: Mapping[str, Answer] | None, after: Mapping[str, Mapping[str, Answer]], count: int) -> Choice:
    """The most telling questions: three of four with the largest drop of ROUGE-L, the rest with the least change.

    Args:
        before: answers of the model before unlearning, if known.
        after: the same by run; only questions that everybody was asked, in the same words, are compared.
        count: how many to show.
    """
    models = ([("before", before)] if before else []) + list(after.items())
    if not models:
        return Choice((), "No model's answers are known.")
    everywhere = [key for key in models[0][1] if all(key in answers for _, answers in models)]
    shared = [key for key in everywhere if len({answers[key].question for _, answers in models}) == 1]
    change = {}  # mean drop of the score; one that was not measured counts as 0
    for key in shared:
        now = [answers[key].score or 0.0 for answers in after.values()]
        change[key] = (before[key].score or 0.0 if before else 0.0) - sum(now) / max(1, len(now))
    largest = sorted(shared, key=lambda key: (-change[key], key))
    least = sorted(shared, key=lambda key: (abs(change[key]), key)) if before else largest[::-1]
    kept = max(1, count * 3 // 4)
    telling = largest[:kept]
    steady = [key for key in least if key not in telling][: max(0, count - kept)]
    what = "ROUGE-L recall fell most" if before else "ROUGE-L recall is lowest"
    other = "it changed least" if before else "it is highest"
    over = " on average over the runs" if len(after) > 1 else ""
    rest = f", then {len(steady)} where {other}" if steady else ""
    examples = []
    for key in [*telling, *steady]:
        first, scores = models[0][1][key], [(name, answers[key].score) for name, answers in models]
        remark = ", ".join(f"{name} {score:.2f}" for name, score in scores if score is not None)
        said = tuple((name, answers[key].text) for name, answers in models)
        examples.append(Example(first.question, first.truth, said, f"ROUGE-L recall: {remark}" if remark else ""))
    how = f"Of {len(shared)} questions asked of every model: the {len(telling)} whose {what}{over}{rest}. "
    return Choice(tuple(examples), f"{how}Not a random sample.")


def mark(text: str, truth: str, question: str) -> list[Span]:
    """Split ``text`` into spans; where it equals ``truth``, every word that carries knowledge agrees.

    Neighbouring words of one kind are one span, with the spaces between them (but no other sign) inside.
    """
    pieces = _WORD.split(text)  # words at odd places, what separates them at even ones
    words, true, asked = ([word.lower() for word in _WORD.findall(of)] for of in (text, truth, question))
    matches = SequenceMatcher(None, true, words, autojunk=False).get_matching_blocks()
    agreeing = {at for block in matches for at in range(block.b, block.b + block.size)}
    known = {*asked, *_FUNCTION_WORDS}
    kinds = [PLAIN if word in known else AGREES if at in agreeing else DIFFERS for at, word in enumerate(words)]
    spans: list[Span] = []
    for at, piece in enumerate(pieces):
        kind = kinds[at // 2] if at % 2 else PLAIN
        if len(spans) > 1 and kind != PLAIN and spans[-1].text == " " and spans[-2].kind == kind:
            spans.pop()
            spans[-1] = Span(f"{spans[-1].text} {piece}", kind)
        elif spans and kind == PLAIN == spans[-1].kind and spans[-1].text != " ":
            spans[-1] = Span(spans[-1].text + piece, kind)
        elif piece:
            spans.append(Span(piece, kind))
    return spans
