"""TOFU (Maini et al., 2024): its splits, from the hub or from a folder of files that are named as on the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError, unknown
from .sources import read_rows

DEFAULT_SOURCE = "locuslab/TOFU"
#: Forget split → the rest of the authors.
_RETAIN = {"forget01": "retain99", "forget05": "retain95", "forget10": "retain90"}


@dataclass(frozen=True)
class Splits:
    """Names of the configurations that belong to one forget split."""

    forget: str
    retain: str
    holdout: str
    forget_perturbed: str
    retain_perturbed: str = "retain_perturbed"
    real_authors: str = "real_authors_perturbed"
    world_facts: str = "world_facts_perturbed"


def split_names(forget_split: str) -> Splits:
    """What goes with ``forget01``, ``forget05`` or ``forget10``."""
    if forget_split not in _RETAIN:
        raise unknown("forget split", forget_split, _RETAIN)
    holdout = forget_split.replace("forget", "holdout")
    return Splits(forget_split, _RETAIN[forget_split], holdout, f"{forget_split}_perturbed")


def tofu_rows(source: str, config: str, *, limit: int | None = None) -> list[Mapping[str, Any]]:
    """The first rows of one configuration (``forget10``, …) of ``source``, which is a hub id or a folder."""
    path = Path(source).expanduser()
    if not path.is_dir() and (path.is_file() or source.startswith((".", "/", "~"))):
        raise DataError(
            f"{source!r} is not a folder: give one with TOFU's files (forget10.json, …), or {DEFAULT_SOURCE}."
        )
    return read_rows(f"{source}:{config}")[:limit]


def check_perturbed(
    plain_rows: Sequence[Mapping[str, Any]],
    perturbed_rows: Sequence[Mapping[str, Any]],
    plain: str,
    perturbed: str,
    *,
    paraphrased: bool = True,
) -> None:
    """Raise unless the perturbed rows are those of their split: the same questions and answers in the same order.

    Args:
        plain, perturbed: names of the two configurations, for the message.
        paraphrased: whether ``paraphrased_answer`` is needed (the real authors and world facts have none).
    """
    for number, (row, other) in enumerate(zip(plain_rows, perturbed_rows, strict=False), 1):
        for key in ("question", "answer"):
            if row.get(key) != other.get(key):
                raise DataError(
                    f"{perturbed} does not match {plain}: row {number} has {key} {str(other.get(key))[:60]!r} where "
                    f"{plain} has {str(row.get(key))[:60]!r}. Take both from the same copy of TOFU."
                )
    if len(plain_rows) != len(perturbed_rows):
        raise DataError(
            f"{perturbed} does not match {plain}: it has {len(perturbed_rows)} rows, not {len(plain_rows)}, so row "
            f"{min(len(plain_rows), len(perturbed_rows)) + 1} differs. Take both from the same copy of TOFU."
        )
    check_answers(perturbed_rows, perturbed, paraphrased=paraphrased)


def check_answers(rows: Sequence[Mapping[str, Any]], config: str, *, paraphrased: bool = True) -> None:
    """Raise for a perturbed row without its alternative answers."""
    for number, row in enumerate(rows, 1):
        wrong = row.get("perturbed_answer")
        if not isinstance(wrong, list) or not wrong or not all(map(_is_text, wrong)):
            raise DataError(
                f"{config}, row {number}: perturbed_answer must be a list of texts, not {str(wrong)[:60]!r}."
            )
        if paraphrased and not _is_text(row.get("paraphrased_answer")):
            raise DataError(f"{config}, row {number}, has no paraphrased_answer; its fields are {sorted(row)}.")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
