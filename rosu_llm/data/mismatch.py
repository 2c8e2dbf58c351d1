"""Wrong answers to the questions of a data set: those of other samples, joined token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .chat_format import IGNORE


def mismatched(question: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, list[int]]:
    """The question of one tokenised sample with the answer of another, of which alone labels are kept.

    What precedes a sample's first label is its question. A text has none: its first half then stands for the question,
    and the second half of the other text for the answer. The result is no longer than the longer of the two.
    """
    asked, told = _start(question), _start(answer)
    longest = max(len(question["input_ids"]), len(answer["input_ids"]))
    joined = {name: _ints(question, name)[:asked] + _ints(answer, name)[told:] for name in ("input_ids", "labels")}
    joined["labels"][:asked] = [IGNORE] * asked
    if "attention_mask" in question or "attention_mask" in answer:
        joined["attention_mask"] = _ints(question, "attention_mask")[:asked] + _ints(answer, "attention_mask")[told:]
    return {name: values[:longest] for name, values in joined.items()}


def _ints(sample: Mapping[str, Any], name: str) -> list[int]:
    if name == "attention_mask" and name not in sample:
        return [1] * len(sample["input_ids"])
    return list(map(int, sample["input_ids"] if name not in sample else sample[name]))


def _start(sample: Mapping[str, Any]) -> int:
    """Where the answer begins; the middle of a text that is all answer."""
    labels = _ints(sample, "labels")
    first = next((i for i, label in enumerate(labels) if label != IGNORE), len(labels))
    return first if first > 1 else (len(labels) + 1) // 2  # nothing predicts a text's first token
