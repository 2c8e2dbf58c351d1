"""diagnosis.json, diagnosis.md and the figures beside them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..analysis.coupling.diagnosis import SCHEMA
from ..errors import DataError
from ..files import write_atomically
from .coupling_plots import FIGURES
from .coupling_tables import markdown
from .plots import PlotsUnavailableError

logger = logging.getLogger(__name__)

FILE = "diagnosis.json"


def write_diagnosis(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write everything; without matplotlib there are no figures, and a line says why."""
    written = [folder / FILE]
    write_atomically(folder / FILE, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    figures: list[str] = []
    try:
        for name, draw in FIGURES.items():
            if draw(document, folder / name):
                figures.append(name)
                written.append(folder / name)
    except PlotsUnavailableError as error:
        logger.warning("%s", error)
    page = folder / "diagnosis.md"
    write_atomically(page, markdown(document, figures))
    return [*written, page]


def read_diagnosis(path: Path) -> dict[str, Any]:
    """The content of a diagnosis.json; DataError where it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a diagnosis: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise DataError(f"{path} is no diagnosis of schema {SCHEMA!r}: write one with 'rosu diagnose'.")
    return found
