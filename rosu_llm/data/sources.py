"""Where samples come from: a local JSON, JSON-lines, CSV or parquet file, a folder of them, or a data set on the hub.

A source is written ``path/to/file.jsonl``, ``path/to/folder:config:split`` or ``owner/name:config:split`` (the
split is ``train`` where none is given), for example ``locuslab/TOFU:forget10``, with some of its rows behind it if
wanted: ``locuslab/TOFU:holdout10[:20]``. A folder holds ``config.json`` or
``config.jsonl``, or a folder ``config/`` with ``train.json`` or ``train.jsonl`` (or another split's). Rows have a
question and an answer, or a text.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from ..errors import DataError, one_line
from ..files import digest
from .chat_format import ChatFormat
from .question_answer import QuestionAnswerDataset

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
#: Those that are no lines of JSON or text.
TABLES = (".csv", ".parquet")

_SOME = re.compile(r"(.+)\[(\d*):(\d*)\]")
_ODD = re.compile(r"(.+)\[[^\[\]]*\]")

Pairs = list[tuple[str | None, str]]
_Row = TypeVar("_Row")


def read_rows(source: str) -> list[Mapping[str, Any]]:
    """The rows of a file, a folder's configuration or a hub data set, or those of them that the source names."""
    whole, some = named_rows(source)
    return some_of(_whole(whole), some, source)


def named_rows(source: str) -> tuple[str, slice]:
    """What is behind a source, and which of its rows; a name with brackets that is there is a name."""
    if _is_there(source):
        return source, slice(None)
    if "+" in "".join(source.split(":")[2:]):  # several splits of a hub's data set, a matter of its library
        return source, slice(None)
    found = _SOME.fullmatch(source)
    whole = found or _ODD.fullmatch(source)
    if whole and _ODD.fullmatch(whole[1]) and not _is_there(whole[1]):
        raise DataError(f"{source!r} names rows twice: name them once, as [first:end].")
    if found:
        return found[1], slice(*(int(end) if end else None for end in found.groups()[1:]))
    if whole and (whole[1].count(":") < 2 or _is_there(whole[1])):  # behind a hub's split they are for its library
        raise DataError(f"{source!r}: rows are named [first:end] with whole numbers from 0, such as [:20] or [20:].")
    return source, slice(None)


def some_of(rows: list[_Row], some: slice, source: str) -> list[_Row]:
    """The rows that a source names, of all those that are there."""
    if rows and not rows[some]:
        raise DataError(f"{source!r} names none of the {len(rows)} rows that are there, which count from 0.")
    return rows[some]


def _is_there(source: str) -> bool:
    try:
        return Path(source).expanduser().exists() or _place(source) is not None
    except DataError:  # a folder without that data set
        return False


def source_content(source: str) -> Any:
    """What tells the rows of a source from others: the digest of a local file, else the name, with the rows named."""
    path, (name, some) = local_file(source), named_rows(source)
    content = name if path is None else digest(path)
    return content if some == slice(None) else [content, some.start, some.stop]


def _whole(source: str) -> list[Mapping[str, Any]]:
    path = local_file(source)
    if path is not None:
        return _read_file(path)
    if source.endswith(SUFFIXES) or source.startswith((".", "/", "~")):
        raise DataError(
            f"{source!r} is not a file. Give an existing .jsonl, .json, .csv or .parquet file, folder:config, or "
            "owner/name:config on the hub."
        )
    return read_hub(source)


def local_file(source: str) -> Path | None:
    """The file a source stands for; None where it is not on this machine."""
    return _place(named_rows(source)[0])


def _place(source: str) -> Path | None:
    path = Path(source).expanduser()
    if path.is_file():
        return path
    # Read from the right: a folder's own path may hold colons.
    folder, _, config = source.rpartition(":")
    outer, _, middle = folder.rpartition(":")
    for place, name, split in ((source, "", "train"), (folder, config, "train"), (outer, middle, config or "train")):
        if place and Path(place).expanduser().is_dir():
            return _in_folder(Path(place).expanduser(), name, split)
    return None


def _in_folder(folder: Path, config: str, split: str) -> Path:
    """The file of a configuration, in either layout; other splits than train are in folders only."""

    def files(pattern: str) -> list[Path]:
        return [path for suffix in SUFFIXES for path in sorted(folder.glob(f"{pattern}{suffix}"))]

    found = {path.stem: path for path in files("*")} | {path.parent.name: path for path in files("*/train")}
    chosen = found if split == "train" else {path.parent.name: path for path in files(f"*/{split}")}
    if config not in chosen:
        there = ", ".join(sorted(found)) or "no .jsonl, .json, .csv or .parquet file"
        name = config if split == "train" else f"{config}:{split}"
        raise DataError(f"{str(folder)!r} has no data set {name!r}; there is: {there}. Write {folder}:NAME.")
    return chosen[config]


def read_text(path: Path) -> str:
    """A text file, with or without byte order mark."""
    try:
        with path.open(encoding="utf-8-sig", newline="" if path.suffix == ".csv" else None) as file:
            return file.read()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}). Save it as UTF-8.") from error


def read_table(path: Path) -> list[Mapping[str, Any]]:
    """The rows of a CSV file, as text with its first line as names, or of a parquet file."""
    if path.suffix == ".csv":
        try:
            rows: list[Mapping[str, Any]] = list(csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True))
        except csv.Error as error:
            raise DataError(f"{path} cannot be read as CSV: {error}.") from error
        for number, row in enumerate(rows, 2):
            if None in row or None in row.values():
                raise DataError(f"{path}, row {number}, has not as many fields as the first line: check its quotes.")
        return rows
    from datasets import Dataset

    try:
        with TemporaryDirectory() as scratch:  # else stale rows of the same path might be served
            return list(Dataset.from_parquet(str(path), cache_dir=scratch, keep_in_memory=True))
    except Exception as error:
        raise DataError(f"{path} cannot be read as parquet: {one_line(error)[:200]}.") from error


def _read_file(path: Path) -> list[Mapping[str, Any]]:
    if path.suffix in TABLES:
        if found := read_table(path):
            return found
        raise DataError(f"{path} holds no row.")
    text = read_text(path)
    if text.lstrip().startswith("["):
        try:
            rows: list[Any] = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{path} begins like a JSON list but does not parse: {error}.") from error
    else:
        rows = []
        for number, line in enumerate(text.split("\n"), 1):  # not splitlines(): U+2028 may stand inside a string
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except (json.JSONDecodeError, RecursionError) as error:
                    raise DataError(
                        f"{path}, line {number}, is not JSON: {error}. Write one object per line."
                    ) from error
    if not rows:
        raise DataError(f"{path} holds no row.")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}, is a {type(row).__name__}, not an object with named fields.")
    return rows


def read_hub(source: str) -> list[Mapping[str, Any]]:
    """The rows of a hub data set, ``owner/name:config:split``."""
    from datasets import load_dataset

    name, _, rest = source.partition(":")
    config, _, split = rest.partition(":")
    try:
        rows = list(load_dataset(name, config or None, split=split or "train"))
    except Exception as error:
        raise DataError(
            f"{source!r} is neither a local file nor a data set that could be loaded from the hub "
            f"({one_line(error)}). Write owner/name:config, e.g. locuslab/TOFU:forget10, or the path of a "
            ".jsonl file."
        ) from error
    if not rows:
        raise DataError(f"{source!r} holds no row.")
    return rows


def load_samples(
    source: str,
    tokenizer: Any,
    *,
    question_key: str = "question",
    answer_key: str = "answer",
    text_key: str = "text",
    max_length: int = 512,
    limit: int | None = None,
    chat_format: ChatFormat | None = None,
) -> QuestionAnswerDataset:
    """Tokenised samples; rows with a text but no question are learned as plain text."""
    pairs = read_pairs(source, question_key, answer_key, text_key, limit)
    return QuestionAnswerDataset(pairs, tokenizer, max_length=max_length, chat_format=chat_format)


def read_pairs(
    source: str,
    question_key: str = "question",
    answer_key: str = "answer",
    text_key: str = "text",
    limit: int | None = None,
) -> Pairs:
    """(question, answer) of every row; (None, text) where it has a text but no question."""
    pairs: Pairs = []
    for number, row in enumerate(read_rows(source)[:limit], 1):
        where = f"Row {number} of {source!r}"
        if question_key in row and answer_key in row:
            pairs.append((text_of(row, question_key, where), text_of(row, answer_key, where, filled=True)))
        elif text_key in row:
            pairs.append((None, text_of(row, text_key, where, filled=True)))
        else:
            raise DataError(
                f"{where} has fields {sorted(row)}, but neither {question_key!r} and {answer_key!r} nor {text_key!r}. "
                "Name the right ones with question_key, answer_key or text_key."
            )
    return pairs


def text_of(row: Mapping[str, Any], key: str, where: str, *, filled: bool = False) -> str:
    """A field as text; ``filled`` refuses an empty one, as there would be nothing to learn."""
    value = row[key]
    if value is None:
        raise DataError(f"{where} has {key}: null. Drop the row or fill it in.")
    if isinstance(value, float) and not isfinite(value):
        raise DataError(f"{where} has {key}: {value}, which is no text. Drop the row or fill it in.")
    if not isinstance(value, (str, int, float)):
        raise DataError(f"{where} has a {type(value).__name__} as {key}, not text. Write one row for each text in it.")
    if filled and not str(value).strip():
        raise DataError(f"{where} has an empty {key}: nothing would be learned from it. Drop the row or fill it in.")
    return str(value)
