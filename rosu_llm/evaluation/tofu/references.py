"""The retain model's results, for forget quality and privleak: read in either tool's layout, refused when of other
questions than the model's."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...files import read_json
from ..collection import find_reference
from ..results import Result
from .metrics import DERIVED, Entry

logger = logging.getLogger(__name__)


def read_retain(
    source: Path | Mapping[str, Any] | None,
    metrics: Iterable[str],
    *,
    forget_split: str,
    questions: int,
    digests: Mapping[str, str],
) -> dict[str, Entry]:
    """The entries that these metrics read; empty without a source.

    Args:
        source: a result file, a folder with one, or the content of one.
        questions: how many forget questions the model is asked.
        digests: of the files with them, compared where the source tells its own.
    """
    if source is None:
        return {}
    if isinstance(source, Mapping):
        name, content = "the retain model's results", dict(source)
    else:
        path = find_reference(source, forget_split)
        name, content = str(path), read_json(path)
        _check_record(Result(path, {}, {}, None, False), forget_split, digests)
    wanted = sorted({key for metric in metrics if metric in DERIVED and (key := DERIVED[metric].reference)})
    found = {key: content[key] for key in wanted if isinstance(content.get(key), dict)}
    if wanted and not found:
        raise DataError(
            f"{name} has none of {', '.join(wanted)} with values per question: give the TOFU_EVAL.json of the retain "
            "model (TOFU_SUMMARY.json has means only)."
        )
    for key in wanted:
        if key not in found:
            logger.warning("%s has no %s: what is made from it stays as without --retain.", name, key)
    for key, each in found.items():
        by_index = (each.get("forget") or each).get("value_by_index", {})
        if len(by_index) != questions:
            raise DataError(
                f"{name} is of other questions: {key} has {len(by_index)} of them, {forget_split} here has "
                f"{questions}. Give the retain model's results on the same split and --limit."
            )
        if not all(map(_is_number, [each.get("agg_value"), *(x.get("score") for x in by_index.values())])):
            raise DataError(f"{name}: {key} has values that are no numbers. Evaluate the retain model again.")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _check_record(result: Result, forget_split: str, digests: Mapping[str, str]) -> None:
    if result.split not in (None, forget_split):
        raise DataError(f"{result.path} is of {result.split}, not of {forget_split}: give the retain model's for it.")
    theirs = result.sidecar.get("conditions", {}).get("data", {})
    for config in digests.keys() & theirs.keys():
        if digests[config] != theirs[config]:
            raise DataError(
                f"{result.path} was made with other rows of {config}: evaluate the retain model on the same data and "
                "with the same --limit."
            )
