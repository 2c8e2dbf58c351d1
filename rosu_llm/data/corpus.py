"""Plain text to forget and to keep: several forget corpora taken in turn, one retain corpus.

A corpus is a hub data set (``owner/name:config:split``) or a file. A file is either JSON lines (objects with a text
field, or strings) or plain lines, one document each. The first line decides which; all others are checked against it,
and the result is logged, because JSON read as plain text would silently train on braces and escapes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from ..errors import DataError
from .pairing import Deck, Epoch
from .sources import SUFFIXES, TABLES, named_rows, read_hub, read_table, read_text, some_of

logger = logging.getLogger(__name__)

_GATED = (
    " The WMDP corpora are gated: ask for the bio forget corpus through the form linked at "
    "https://huggingface.co/datasets/cais/wmdp-corpora and save it as JSON lines; the cyber one is "
    "cais/wmdp-corpora:cyber-forget-corpus after 'hf auth login'."
)


class TextCorpus(Dataset[dict[str, Any]]):
    """Documents of one corpus, tokenised when asked for.

    Args:
        texts: the documents.
        tokenizer: turns one into ``input_ids``, special tokens as it adds them.
        max_length: longest document in tokens; longer ones are cut.
        corpus: a number that tells this corpus from others in a batch.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any, *, max_length: int = 512, corpus: int = 0) -> None:
        if max_length < 2:
            raise DataError(f"max_length={max_length} leaves nothing to learn from: give at least 2 tokens.")
        self.texts, self._tokenizer = texts, tokenizer
        self._max_length, self._corpus = max_length, corpus

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self._tokenizer(self.texts[index], truncation=True, max_length=self._max_length)["input_ids"]
        if not ids:
            raise DataError(f"Document {index} has no token: {self.texts[index][:40]!r}.")
        return {"input_ids": ids, "corpus": self._corpus}


def load_corpus(
    source: str,
    tokenizer: Any,
    *,
    text_key: str = "text",
    min_length: int = 0,
    max_length: int = 512,
    limit: int | None = None,
    corpus: int = 0,
) -> TextCorpus:
    """The documents of ``source`` with more than ``min_length`` characters; the first ``limit`` of them."""
    name, some = named_rows(source)
    texts, kind = _read(name, text_key)
    texts = some_of(texts, some, source)
    kept = [text for text in texts if len(text) > min_length and text.strip()]
    if not kept:
        longest = max((len(text) for text in texts), default=0)
        raise DataError(
            f"{source!r} ({kind}) has {len(texts)} documents, none with more than min_length={min_length} characters "
            f"(the longest has {longest}). Lower min_length, or check the file."
        )
    logger.info("%s: %s, %d documents, %d too short and left out", source, kind, len(kept), len(texts) - len(kept))
    return TextCorpus(kept[:limit], tokenizer, max_length=max_length, corpus=corpus)


def _read(source: str, text_key: str) -> tuple[list[str], str]:
    path = Path(source).expanduser()
    if not path.is_file():
        hint = _GATED if "wmdp" in source.lower() or "forget-corpus" in source.lower() else ""
        if path.suffix in (*SUFFIXES, ".txt") or source.startswith((".", "/", "~")):
            raise DataError(
                f"{source!r} is not a file. Give a .jsonl, .csv, .parquet or .txt file, or owner/name:config.{hint}"
            )
        try:
            rows = read_hub(source)
        except DataError as error:
            raise DataError(f"{error}{hint}") from error
        texts = [_text(row, text_key, f"{source}, row {number},") for number, row in enumerate(rows, 1)]
        return texts, f"hub, field {text_key!r}"
    if path.suffix in TABLES:
        rows = read_table(path)
        texts = [_text(row, text_key, f"{path}, row {number},") for number, row in enumerate(rows, 1)]
        return texts, f"{path.suffix[1:]}, field {text_key!r}"
    every = enumerate(read_text(path).split("\n"), 1)  # U+2028 ends no line
    lines = [(number, line) for number, line in every if line.strip()]
    if not lines:
        raise DataError(f"{path} is empty.")
    if path.suffix not in (".json", ".jsonl") and not _is_json(lines[0][1]):
        objects = [number for number, line in lines if line.lstrip().startswith("{") and _is_json(line)]
        if objects:
            raise DataError(
                f"{path}, line {objects[0]}, is a JSON object although the first line is plain text: write one JSON "
                "object per line throughout, or plain lines."
            )
        return [line for _, line in lines], "plain lines"
    texts = []
    for number, line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}, line {number}, is not JSON ({error.msg}) although "
                + ("the file's name says so. " if number == lines[0][0] else "the first one is. ")
                + "Write one JSON object per line, or plain lines in a .txt file."
            ) from error
        texts.append(_text(row, text_key, f"{path}, line {number},"))
    return texts, f"JSON lines, field {text_key!r}"


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), (dict, str))
    except json.JSONDecodeError:
        return False


def _text(row: Any, key: str, where: str) -> str:
    if isinstance(row, str):
        return row
    if isinstance(row, Mapping) and isinstance(row.get(key), str):
        return str(row[key])
    found = f"fields {sorted(row)}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
    raise DataError(f"{where} has {found}, but no text under {key!r}: name the field by text_key.")


class AlternatingCorpora(Epoch, Dataset[dict[str, Any]]):
    """Pairs of forget and retain documents; every step takes all its forget documents from one corpus.

    Step t (over all ranks and micro-batches) draws from corpus t mod k. Samples must be read in order. Which
    documents are drawn is a function of (seed, epoch, index) alone, so a resumed run sees the same ones; each corpus
    is read in shuffled rounds, and an epoch continues where the one before ended. An epoch sees every document of the
    longest forget corpus.

    Args:
        forget: one or several corpora.
        retain: what is kept.
        window: documents per step: batch size × accumulation × processes.
        seed: of the shuffling.
    """

    def __init__(self, forget: Sequence[Any], retain: Any, *, window: int, seed: int = 0) -> None:
        if not forget or any(len(part) == 0 for part in (*forget, retain)):
            raise DataError("A corpus is empty: unlearning needs documents to forget and documents to keep.")
        if window < 1:
            raise DataError(f"window={window} must be at least 1.")
        self.forget, self.retain, self.window = list(forget), retain, window
        super().__init__()
        self._rounds = -(-max(len(part) for part in forget) // window)
        self._decks = [Deck(len(part), seed * 1009 + i) for i, part in enumerate((*forget, retain))]

    def __len__(self) -> int:
        return self._rounds * self.window * len(self.forget)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        step, offset = divmod(index, self.window)
        turn, corpus = divmod(step, len(self.forget))
        position = (self.epoch * self._rounds + turn) * self.window + offset
        document = self.forget[corpus][self._decks[corpus][position]]
        kept = self.retain[self._decks[-1][self.epoch * len(self) + index]]
        return {"forget": document, "retain": [kept]}
