"""The questions and all their answers as tokens, read and checked before the model runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

from ...data.chat_format import ChatFormat, Encoded, check_length, encode_chat
from ...data.tofu import check_answers, check_perturbed, split_names, tofu_rows
from ...errors import DataError
from .metrics import AnswerField, TofuSettings

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TofuQuestions:
    """The rows of each data set (``forget``, ``holdout``, ``retain``, ``ra``, ``wf``) and the digests of them."""

    rows: Mapping[str, Rows]
    digests: Mapping[str, str]


def load_questions(settings: TofuSettings, datasets: Iterable[str]) -> TofuQuestions:
    """Read the rows of these data sets; raises for files that are missing or do not match."""
    splits = split_names(settings.forget_split)
    read = partial(tofu_rows, settings.data, limit=settings.limit)
    configs = {
        "forget": splits.forget_perturbed,
        "holdout": splits.holdout,
        "retain": splits.retain_perturbed,
        "ra": splits.real_authors,
        "wf": splits.world_facts,
    }
    rows: dict[str, Rows] = {}
    for name in sorted(datasets):
        rows[name] = _unseen(settings, configs[name]) if name == "holdout" else read(configs[name])
        _check_text(rows[name], configs[name])
        if name == "forget":
            check_perturbed(read(splits.forget), rows[name], splits.forget, splits.forget_perturbed)
        elif name != "holdout":
            check_answers(rows[name], configs[name], paraphrased=name == "retain")
    texts = {
        configs[name]: json.dumps([dict(row) for row in found], sort_keys=True, ensure_ascii=False)
        for name, found in rows.items()
    }
    return TofuQuestions(rows, {name: f"sha256:{sha256(text.encode()).hexdigest()}" for name, text in texts.items()})


def _unseen(settings: TofuSettings, config: str) -> Rows:
    """The held-out rows without those that training looked at."""
    rows = tofu_rows(settings.data, config)
    aside = settings.held_out_questions or 0
    if aside >= len(rows):
        raise DataError(
            f"--held-out-questions {aside} sets all {len(rows)} questions of {config} aside, and the attacks need "
            "some: let training look at fewer."
        )
    return rows[aside:][: settings.limit]


class Encoder:
    """Questions and answers as the model sees them, each encoded once.

    Args:
        context: how many tokens the model can see; a longer answer raises.
    """

    def __init__(
        self, questions: TofuQuestions, tokenizer: Any, form: ChatFormat, *, max_length: int, context: int | None
    ) -> None:
        self.questions, self.tokenizer, self.form = questions, tokenizer, form
        self.max_length, self.context = max_length, context
        self._done: dict[AnswerField, list[list[Encoded]]] = {}

    def __call__(self, which: AnswerField) -> list[list[Encoded]]:
        """For each question its answers; most questions have one."""
        if which not in self._done:
            self._done[which] = [self._encode(row, which.field) for row in self.questions.rows[which.dataset]]
        return self._done[which]

    def _encode(self, row: Mapping[str, Any], field: str) -> list[Encoded]:
        question, found = row["question"], []
        for answer in [row[field]] if isinstance(row[field], str) else row[field]:
            found.append(encode_chat(question, answer, self.tokenizer, self.form, max_length=self.max_length))
            if self.context is not None:
                check_length(found[-1], self.context, question, what="the model's context")
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
