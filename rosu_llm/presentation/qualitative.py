"""Answers to forget questions before and after unlearning, with what agrees with the truth told from what does not.

As in the paper's qualitative figure: in every answer, words that follow the true answer are marked as agreeing, other
words as differing. What the question says already and function words carry no knowledge and are left unmarked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

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
_PIECE = re.compile(r"\w+|\W+")


@dataclass(frozen=True)
class Answer:
    """One model's answer to one question; ``score`` is its ROUGE-L recall where that was measured."""

    question: str
    truth: str
    text: str
    score: float | None = None


@dataclass(frozen=True)
class Span:
    """A stretch of text of one kind: ``agrees``, ``differs`` or ``plain``."""

    text: str
    kind: str


@dataclass(frozen=True)
class Example:
    """One question with the true answer and what each model says, in the order of the models."""

    question: str
    truth: str
    answers: tuple[tuple[str, str], ...]
    remark: str = ""


@dataclass(frozen=True)
class Choice:
    """The examples shown, and how they were chosen."""

    examples: tuple[Example, ...]
    how: str


def read_answers(path: Path) -> dict[str, Answer]:
    """Question number → answer, from a ``TOFU_EVAL.json`` that has generations."""
    metric = read_json(path).get(METRIC)
    entries = metric.get("value_by_index") if isinstance(metric, Mapping) else None
    if not isinstance(entries, Mapping) or not entries:
        raise DataError(f"{path} holds no generated answers ({METRIC} with value_by_index): evaluate that metric.")
    found = {str(key): _answer(entry) for key, entry in entries.items() if isinstance(entry, Mapping)}
    return {key: answer for key, answer in found.items() if answer is not None}


def _answer(entry: Mapping[str, Any]) -> Answer | None:
    texts = [entry.get(key) for key in ("input", "ground_truth", "generation")]
    if not all(isinstance(text, str) for text in texts):
        return None
    question, truth, generation = map(str, texts)
    score = entry.get(SCORE)
    usable = float(score) if isinstance(score, int | float) and 0 <= score <= 1 else None
    return Answer(question_of(question), truth.strip(), generation.strip(), usable)


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
    shared = [key for key in models[0][1] if _same_question([answers.get(key) for _, answers in models])]
    change = {key: _change(before[key] if before else None, [a[key] for a in after.values()]) for key in shared}
    largest = sorted(shared, key=lambda key: (-change[key], key))
    least = sorted(shared, key=lambda key: (abs(change[key]), key)) if before else largest[::-1]
    kept = max(1, count * 3 // 4)
    telling = largest[:kept]
    steady = [key for key in least if key not in telling][: max(0, count - kept)]
    what = "ROUGE-L recall fell most" if before else "ROUGE-L recall is lowest"
    other = "it changed least" if before else "it is highest"
    over = " on average over the runs" if len(after) > 1 else ""
    rest = f", then {len(steady)} where {other}" if steady else ""
    return Choice(
        tuple(_example(key, models) for key in [*telling, *steady]),
        f"Of {len(shared)} questions asked of every model: the {len(telling)} whose {what}{over}{rest}. "
        "Not a random sample.",
    )


def _same_question(answers: Sequence[Answer | None]) -> bool:
    return all(answer is not None for answer in answers) and len({a.question for a in answers if a is not None}) == 1


def _change(before: Answer | None, after: Sequence[Answer]) -> float:
    """Mean drop of the score; a score that was not measured counts as 0."""
    now = sum(answer.score or 0.0 for answer in after) / len(after) if after else 0.0
    return (before.score or 0.0 if before else 0.0) - now


def _example(key: str, models: Sequence[tuple[str, Mapping[str, Answer]]]) -> Example:
    first = models[0][1][key]
    scores = [(name, answers[key].score) for name, answers in models]
    remark = ", ".join(f"{name} {score:.2f}" for name, score in scores if score is not None)
    answers = tuple((name, answers[key].text) for name, answers in models)
    return Example(first.question, first.truth, answers, f"ROUGE-L recall: {remark}" if remark else "")


def mark(text: str, truth: str, question: str) -> list[Span]:
    """``text`` in spans; for ``text == truth`` everything worth knowing agrees."""
    pieces = _PIECE.findall(text)
    words = [piece.lower() for piece in pieces if _is_word(piece)]
    true = [piece.lower() for piece in _PIECE.findall(truth) if _is_word(piece)]
    agreeing: set[int] = set()
    for block in SequenceMatcher(None, true, words, autojunk=False).get_matching_blocks():
        agreeing.update(range(block.b, block.b + block.size))
    known = {piece.lower() for piece in _PIECE.findall(question)} | _FUNCTION_WORDS
    kinds = [PLAIN if word in known else AGREES if at in agreeing else DIFFERS for at, word in enumerate(words)]
    return _joined(pieces, kinds)


def _is_word(piece: str) -> bool:
    return piece[0].isalnum() or piece[0] == "_"


def _joined(pieces: Sequence[str], kinds: Sequence[str]) -> list[Span]:
    """Neighbouring words of one kind as one span, with the spaces between them (but no other sign) inside."""
    spans: list[Span] = []
    left = iter(kinds)
    for piece in pieces:
        kind = next(left) if _is_word(piece) else PLAIN
        if len(spans) > 1 and kind != PLAIN and spans[-1].text == " " and spans[-2].kind == kind:
            spans.pop()
            spans[-1] = Span(f"{spans[-1].text} {piece}", kind)
        elif spans and kind == PLAIN == spans[-1].kind and spans[-1].text != " ":
            spans[-1] = Span(spans[-1].text + piece, kind)
        else:
            spans.append(Span(piece, kind))
    return spans


_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~&$]|^(?:[+-]|#+)(?= )|(?<=^\d)[.)](?= ))")
_SIGNS = {AGREES: "**", DIFFERS: "~~", PLAIN: ""}


def escape_markdown(text: str) -> str:
    """Text that markdown shows as it is, on one line, also inside a table."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def markdown(choice: Choice, *, level: int = 1) -> str:
    """The examples under a heading of this level."""
    lines = ["#" * level + " Answers before and after", "", choice.how, ""]
    lines += [f"{LEGEND} **Bold** agrees, ~~struck~~ differs.", ""]
    for example in choice.examples:
        lines += [f"**Prompt:** {escape_markdown(example.question)}", ""]
        for name, text in (("Ground truth", example.truth), *example.answers):
            lines.append(f"- *{escape_markdown(name)}*: {_marked_markdown(text, example)}")
        lines += ["", *([escape_markdown(example.remark), ""] if example.remark else [])]
    return "\n".join(lines)


def _marked_markdown(text: str, example: Example) -> str:
    if not text.strip():
        return "(empty)"
    spans = mark(" ".join(text.split()), example.truth, example.question)
    # not through escape_markdown as a whole: it would eat the spaces at a span's ends
    return "".join(_SIGNS[s.kind] + _MARKDOWN.sub(r"\\\1", s.text) + _SIGNS[s.kind] for s in spans)
