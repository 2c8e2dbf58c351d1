"""A cache of results, addressed by everything that determines one."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..files import read_json, write_json

logger = logging.getLogger(__name__)


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
