"""What a report is made of, before it is HTML or markdown: sections of text, tables, figures and answers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..qualitative import Choice

MISSING = "–"
_FIGURE = re.compile(r"$|[–∞]|NaN|[−+-]?[\d.]")


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Missing:
    """What is not there, and what would make it."""

    text: str


@dataclass(frozen=True)
class Grid:
    """A table of text.

    Attributes:
        marked: (row, column) of cells to stand out.
        groups: row → heading above it.
        notes: lines below it.
        folded: shown on demand only.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[tuple[int, int]] = frozenset()
    groups: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    folded: bool = False

    @property
    def numeric(self) -> tuple[bool, ...]:
        """For each column whether it holds figures, which stand to the right."""
        return tuple(at > 0 and all(_FIGURE.match(row[at]) for row in self.rows) for at in range(len(self.columns)))


@dataclass(frozen=True)
class Figure:
    """A picture drawn on demand, once per colour scheme, with its data behind it.

    Attributes:
        key: file name without suffix.
        draw: puts the picture on a matplotlib figure.
        size: inches; half a page is about 5 wide, so that a phone shows it at its true size.
    """

    key: str
    title: str
    alt: str
    draw: Callable[[Any], None]
    data: Grid
    caption: str = ""
    size: tuple[float, float] = (5.0, 3.1)


@dataclass(frozen=True)
class Answers:
    """Questions with marked answers."""

    choice: Choice


Block = Text | Missing | Grid | Figure | Answers


@dataclass(frozen=True)
class Section:
    """A heading with what belongs under it; ``key`` is the anchor."""

    key: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """The whole page; ``main`` has the table for a run's model card by the run's folder."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    main: Mapping[Path, Grid] = field(default_factory=dict)


def shown(value: Any, digits: int = 4) -> str:
    """A figure in a table: short, a dash where there is none, ``NaN`` and ``∞`` by name."""
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return str(value) if isinstance(value, int) else f"{value:.{digits}g}"
