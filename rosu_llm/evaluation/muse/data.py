"""MUSE's texts and questions as tokens, as OpenUnlearning's data sets give them.

    knowmem   questions behind ten solved ones (forget_qa_icl, retain_qa_icl): KnowMem on forget and retain
    verbmem   the beginning of a passage (prompt) and how it goes on (gt): VerbMem, extraction strength
    privleak  whole texts of the forget set and of a holdout set: the Min-K attack behind PrivLeak

A text's first token has no prediction. Texts are cut after 2048 tokens behind their prefix, questions with their
examples at 512 (with tags; a chat template is never cut).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...data.chat_format import IGNORE, ChatFormat, Encoded, token_ids
from ...data.sources import read_rows, text_of
from ...errors import ConfigError, DataError, unknown

SPLITS = ("News", "Books")
TEXT_LENGTH, QUESTION_LENGTH = 2048, 512

Rows = list[Mapping[str, Any]]


class MusePart(NamedTuple):
    """Rows of one configuration and split, and the fields they must have."""

    config: str
    split: str
    fields: tuple[str, ...]


PARTS = {
    "forget_knowmem": MusePart("knowmem", "forget_qa", ("question", "answer")),
    "forget_examples": MusePart("knowmem", "forget_qa_icl", ("question", "answer")),
    "retain_knowmem": MusePart("knowmem", "retain_qa", ("question", "answer")),
    "retain_examples": MusePart("knowmem", "retain_qa_icl", ("question", "answer")),
    "verbmem": MusePart("verbmem", "forget", ("prompt", "gt")),
    "mia_forget": MusePart("privleak", "forget", ("text",)),
    "mia_holdout": MusePart("privleak", "holdout", ("text",)),
}


def source_of(data: str | None, split: str) -> str:
    """Where the data comes from: as given, else the hub's set of this name."""
    if split not in SPLITS:
        raise unknown("split of MUSE", split, SPLITS)
    return data or f"muse-bench/MUSE-{split}"


def read_part(source: str, part: str, limit: int | None) -> Rows:
    """The rows of a part, each checked for its fields; examples are never limited."""
    config, split, fields = PARTS[part]
    rows = list(read_rows(f"{source}:{config}:{split}"))[: None if part.endswith("examples") else limit]
    for number, row in enumerate(rows, 1):
        where = f"Row {number} of {source}:{config}:{split}"
        for key in fields:
            if key not in row:
                raise DataError(f"{where} has fields {sorted(row)}, but no {key!r}: is this MUSE's data?")
            text_of(row, key, where, filled=key != "prompt")
    if not rows:
        raise DataError(f"{source}:{config}:{split} holds no row.")
    return rows


def encode_text(prefix: str, text: str, tokenizer: Any, *, space: bool) -> Encoded:
    """A text behind a prefix, which may be empty; labels are on the text alone."""
    whole = list(tokenizer(prefix + (" " if space else "") + text, add_special_tokens=True)["input_ids"])
    begun = list(tokenizer(prefix, add_special_tokens=True)["input_ids"])
    whole = whole[: len(begun) + TEXT_LENGTH]
    start = max(len(begun), 1)
    if len(whole) <= start:
        raise DataError(f"No token of the text {text[:60]!r} is left behind its {len(begun)} first: drop the row.")
    return Encoded(whole, [IGNORE] * start + whole[start:], begun)


def encode_question(row: Mapping[str, Any], examples: Rows, tokenizer: Any, form: ChatFormat) -> Encoded:
    """A question behind solved ones, and its answer."""
    end = tokenizer.eos_token_id
    if end is None:
        raise ConfigError("The tokenizer has no end-of-text token: set eos_token in its tokenizer_config.json.")
    if form.apply_chat_template:
        chat = [{"role": "system", "content": form.system_prompt}] if form.system_prompt else []
        for each in (*examples, row):
            chat += [{"role": "user", "content": each["question"]}, {"role": "assistant", "content": each["answer"]}]
        dated = {"date_string": form.date_string} if form.date_string is not None else {}
        whole = token_ids(tokenizer.apply_chat_template(chat, tokenize=True, **dated))
        prompt = token_ids(tokenizer.apply_chat_template(chat[:-1], tokenize=True, add_generation_prompt=True, **dated))
    else:
        text = form.system_prompt_with_special_tokens or ""
        for each in examples:
            text += f"{form.user_start_tag}{each['question']}{form.user_end_tag}"
            text += f"{form.asst_start_tag}{each['answer']}{form.asst_end_tag or ''}"
        text += f"{form.user_start_tag}{row['question']}{form.user_end_tag}{form.asst_start_tag}"
        cut: dict[str, Any] = {"add_special_tokens": True, "max_length": QUESTION_LENGTH, "truncation": True}
        prompt = list(tokenizer(text, **cut)["input_ids"])
        whole = list(tokenizer(text + row["answer"], **cut)["input_ids"])
    if whole[-1] != end:
        whole = [*whole, end]
    return Encoded(whole, [IGNORE] * len(prompt) + whole[len(prompt) :], prompt)


def count_cut(samples: Sequence[Encoded], form: ChatFormat) -> int:
    """How many questions were cut, so that the model does not see all of them."""
    return 0 if form.apply_chat_template else sum(len(each.prompt_ids) >= QUESTION_LENGTH for each in samples)
