"""What results are shown as, whatever the format: sections of text, tables, figures and answers.

A file of this folder turns one kind of document into a section; a file of ``writers`` turns sections into one format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import read_json
from .qualitative import Choice

MISSING = "–"
_NUMBER = re.compile(r"$|[–∞✓✗>≈]|NaN|[−+-]?[\d.]")


@dataclass(frozen=True)
class Text:
    """A paragraph; a ``strong`` one stands out."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Missing:
    """What is not there, and what would make it."""

    text: str


@dataclass(frozen=True)
class TableCell:
    """A figure, or text where there is none.

    Attributes:
        footnote: number of the footnote that explains the cell.
        spread: standard deviation of the figure, shown after it.
        text: what to show where there is no figure, in place of a dash.
    """

    value: float | None = None
    footnote: int | None = None
    spread: float | None = None
    text: str | None = None


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        reference: a model to compare with rather than a result; never the best.
        details: more about the row, for JSON only.
    """

    label: str
    cells: tuple[TableCell, ...]
    reference: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """Rows under columns; where a column has a best figure, it is the highest.

    Attributes:
        heading: what a row is: the heading above the labels.
        notes: lines below the table; footnotes too, but numbered from 1.
        digits: decimals of the figures.
        marked: (row, column) of cells to stand out; the labels are column 0.
        groups: row → heading above it.
        folded: left out on a terminal, and shown on demand on a page.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    footnotes: tuple[str, ...] = ()
    heading: str = "method"
    caption: str = ""
    digits: int = 2
    marked: frozenset[tuple[int, int]] = frozenset()
    groups: Mapping[int, str] = field(default_factory=dict)
    folded: bool = False

    @property
    def headings(self) -> tuple[str, ...]:
        """The headings of all columns, that of the labels first."""
        return (self.heading, *self.columns)

    @property
    def numeric(self) -> tuple[bool, ...]:
        """For each column, labels first, whether it holds figures, which are aligned to the right."""
        texts = [[self.figure(row.cells[at]) for row in self.rows] for at in range(len(self.columns))]
        return (False, *(all(_NUMBER.match(text) for text in column) for column in texts))

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Notes, then footnotes with their numbers."""
        return (*self.notes, *(f"[{at}] {note}" for at, note in enumerate(self.footnotes, 1)))

    def figure(self, cell: TableCell) -> str:
        """The cell without its spread and footnote."""
        if cell.value is not None:
            return number(cell.value, self.digits)
        return MISSING if cell.text is None else cell.text

    def lines(self) -> tuple[tuple[str, ...], ...]:
        """The rows as plain text, labels first, figures with their spread and footnote."""

        def full(cell: TableCell) -> str:
            spread = "" if cell.spread is None else f" ± {number(cell.spread, self.digits)}"
            return self.figure(cell) + spread + ("" if cell.footnote is None else f" [{cell.footnote}]")

        return tuple((row.label, *map(full, row.cells)) for row in self.rows)

    def best(self) -> set[tuple[int, int]]:
        """(row, column) of the largest figure of each column as shown, ties included, reference rows left out."""
        best: set[tuple[int, int]] = set()
        for column in range(len(self.columns)):
            shown = {
                at: float(self.figure(row.cells[column]))
                for at, row in enumerate(self.rows)
                if not row.reference and row.cells[column].value is not None
            }
            best |= {(at, column + 1) for at, value in shown.items() if value == max(shown.values())}
        return best


@dataclass(frozen=True)
class Figure:
    """A picture drawn on demand, with its data behind it.

    Attributes:
        key: file name without suffix.
        draw: puts the picture on a matplotlib figure.
        size: inches; half a page is about 5 wide, so that a phone shows it at its true size.
    """

    key: str
    title: str
    alt: str
    draw: Callable[[Any], None]
    data: Table
    caption: str = ""
    size: tuple[float, float] = (5.0, 3.1)


Block = Text | Missing | Table | Figure | Choice


@dataclass(frozen=True)
class Section:
    """A heading with what belongs under it; ``key`` is the anchor."""

    key: str
    title: str
    blocks: Sequence[Block]

    @property
    def tables(self) -> list[Table]:
        """The tables, without those behind figures."""
        return [block for block in self.blocks if isinstance(block, Table)]

    @property
    def figures(self) -> list[Figure]:
        """The figures."""
        return [block for block in self.blocks if isinstance(block, Figure)]


@dataclass(frozen=True)
class Report:
    """The whole page; ``main`` has the table for a run's model card by the run's folder."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    main: Mapping[Path, Table] = field(default_factory=dict)


class Footnotes(list[str]):
    """The footnotes of a table under construction."""

    def mark(self, text: str | None) -> int | None:
        """The number of this footnote, which is added unless it is there; None for no text."""
        if not text:
            return None
        if text not in self:
            self.append(text)
        return self.index(text) + 1


def text_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], **more: Any) -> Table:
    """A table of text; the first column holds the labels. ``more`` are other fields of the table."""
    made = tuple(Row(label, tuple(TableCell(text=text) for text in texts)) for label, *texts in rows)
    return Table(tuple(columns[1:]), made, heading=columns[0], caption=caption, **more)


def number(value: float, digits: int) -> str:
    """A figure with so many decimals: the one place where figures of tables are rounded."""
    return f"{value:.{digits}f}"


def shown(value: Any, digits: int = 4) -> str:
    """A figure of unknown size with so many significant digits; a dash for None, ``NaN`` and ``∞`` by name."""
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return str(value) if isinstance(value, int) else f"{value:.{digits}g}"


def printed(table: str) -> dict[str, tuple[Any, ...]]:
    """Row → figures, as the paper prints them, from this table of ``paper.json``."""
    rows = read_json(Path(__file__).with_name("paper.json"))[table]["rows"]
    return {name: tuple(figures) for name, figures in rows.items()}
