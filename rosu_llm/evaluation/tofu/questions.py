"""The questions that are asked, read and checked before any work: all their answers as tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...data.chat_format import ChatFormat, Encoded, check_length, encode_chat
from ...data.tofu import check_answers, check_perturbed, split_names, tofu_rows
from ...errors import ConfigError, DataError
from .metrics import Answers

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Questions:
    """The rows of each data set (``forget``, ``holdout``, ``retain``, ``ra``, ``wf``) and the digests of them."""

    rows: Mapping[str, Rows]
    digests: Mapping[str, str]


def load_questions(source: str, forget_split: str, datasets: Iterable[str], limit: int | None) -> Questions:
    """Read what is needed; missing and mismatching files raise."""
    splits = split_names(forget_split)
    configs = {
        "forget": splits.forget_perturbed,
        "holdout": splits.holdout,
        "retain": splits.retain_perturbed,
        "ra": splits.real_authors,
        "wf": splits.world_facts,
    }
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit} must be at least 1 question per data set.")
    rows: dict[str, Rows] = {}
    for name in sorted(datasets):
        rows[name] = tofu_rows(source, configs[name], limit=limit)
        _check_text(rows[name], configs[name])
        if name == "forget":
            plain = tofu_rows(source, splits.forget, limit=limit)
            check_perturbed(plain, rows[name], splits.forget, splits.forget_perturbed)
        elif name != "holdout":
            check_answers(rows[name], configs[name], paraphrased=name == "retain")
    return Questions(rows, {configs[name]: _digest(found) for name, found in rows.items()})


class Encoder:
    """Questions and answers as the model sees them, each encoded once.

    Args:
        context: how many tokens the model can see; a longer answer raises.
    """

    def __init__(
        self, questions: Questions, tokenizer: Any, form: ChatFormat, *, max_length: int, context: int | None
    ) -> None:
        self.questions, self.tokenizer, self.form = questions, tokenizer, form
        self.max_length, self.context = max_length, context
        self._done: dict[Answers, list[list[Encoded]]] = {}

    def __call__(self, which: Answers) -> list[list[Encoded]]:
        """For each question its answers, of which most have one."""
        if which not in self._done:
            self._done[which] = [self._encode(row, which.field) for row in self.questions.rows[which.dataset]]
        return self._done[which]

    def _encode(self, row: Mapping[str, Any], field: str) -> list[Encoded]:
        question = row["question"]
        answers = [row[field]] if isinstance(row[field], str) else row[field]
        found = [encode_chat(question, text, self.tokenizer, self.form, max_length=self.max_length) for text in answers]
        if self.context is not None:
            for encoded in found:
                check_length(encoded, self.context, question, what="the model's context")
        return found


def _check_text(rows: Rows, config: str) -> None:
    if not rows:
        raise DataError(f"{config} holds no row.")
    for number, row in enumerate(rows, 1):
        for key in ("question", "answer"):
            if not isinstance(row.get(key), str) or not row[key].strip():
                raise DataError(f"{config}, row {number}: {key} must be text, not {str(row.get(key))[:60]!r}.")
        try:
            json.dumps(dict(row), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{config}, row {number} holds half a character ({error.object[error.start : error.end]!a}), which is "
                "no text: repair or drop the row."
            ) from None


def _digest(rows: Rows) -> str:
    text = json.dumps([dict(row) for row in rows], sort_keys=True, ensure_ascii=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
