"""Results on disk: JSON written beside and renamed, and a cache addressed by everything that determines a result."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..training.checkpoint import write_atomically

logger = logging.getLogger(__name__)


def write_json(path: Path, value: Mapping[str, Any]) -> Path:
    """Write ``value`` so that ``path`` is absent, as it was, or complete; refuses NaN, which is not JSON."""
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__}, not an object with named fields.")
    return value


def default_cache() -> Path:
    """``$ROSU_CACHE``, else ``rosu_llm`` in the user's cache folder."""
    if named := os.environ.get("ROSU_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rosu_llm"


class ResultCache:
    """One file per result, named by the hash of its conditions, which are stored too and compared on reading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, conditions: Mapping[str, Any]) -> Path:
        """Where a result under these conditions lives."""
        text = json.dumps(conditions, sort_keys=True, ensure_ascii=False)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def get(self, conditions: Mapping[str, Any]) -> dict[str, Any] | None:
        """The stored result, or nothing; an unreadable file counts as nothing."""
        path = self.path(conditions)
        if not path.is_file():
            return None
        try:
            entry = read_json(path)
        except DataError as error:
            logger.warning("Ignoring a cached result: %s", error)
            return None
        # compared as JSON, where tuples are lists
        if entry.get("conditions") != json.loads(json.dumps(conditions)):
            return None
        result: dict[str, Any] | None = entry.get("result")
        return result

    def put(self, conditions: Mapping[str, Any], result: Mapping[str, Any]) -> Path:
        """Store ``result``."""
        return write_json(self.path(conditions), {"conditions": conditions, "result": result})
