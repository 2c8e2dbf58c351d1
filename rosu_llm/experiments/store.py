"""Finished cells: one JSON file each, written beside and renamed, so that a killed run leaves whole files or none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..files import write_atomically

DONE, FAILED = "done", "failed"


def cell_key(task: Mapping[str, Any], settings: Mapping[str, Any], seed: int) -> str:
    """A name for everything that the figures of a cell depend on, the package's version included."""
    content = {"task": task, "settings": settings, "seed": seed, "version": __version__}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Record:
    """What is kept of a cell.

    Attributes:
        label: the row it was first run for; other grids may share the cell.
        status: ``done`` with metrics, or ``failed`` with the line of the error.
        model: folder of the kept model.
    """

    key: str
    label: str
    seed: int
    status: str
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    model: str | None = None
    task: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    version: str = __version__


class Store:
    """The records below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Record | None:
        """The record of a cell; a file that is no record (edited, cut off by a full disk) counts as none."""
        try:
            content = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            record = Record(**content)
        except (OSError, ValueError, TypeError):
            return None
        return record if record.key == key and record.status in (DONE, FAILED) else None

    def put(self, record: Record) -> None:
        """Keep a cell."""
        text = json.dumps(asdict(record), indent=1, ensure_ascii=False, default=str)
        write_atomically(self.folder / f"{record.key}.json", text + "\n")
