"""Sections and tables as files and on the terminal: markdown and LaTeX have modules of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ...errors import unknown
from ...files import write_atomically
from ..blocks import Figure, Missing, Section, Table, Text
from ..drawing import PlotsUnavailableError, png
from . import latex, markdown


def _json_table(table: Table, *, bold: bool = False) -> str:
    """Unrounded figures with everything known about each row; neither the table's ``digits`` nor ``bold`` apply."""
    rows = []
    for row in table.rows:
        cells = dict(zip(table.columns, row.cells, strict=True))
        spread = {column: cell.spread for column, cell in cells.items() if cell.spread is not None}
        footnotes = {column: table.footnotes[cell.footnote - 1] for column, cell in cells.items() if cell.footnote}
        figures = {column: cell.text if cell.value is None else cell.value for column, cell in cells.items()}
        found = {table.heading: row.label, **figures, "reference": row.reference, "missing": footnotes}
        rows.append({**found, **({"spread": spread} if spread else {}), **row.details})
    content = {"columns": table.columns, "rows": rows, "notes": table.notes}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


FORMATS: dict[str, Callable[..., str]] = {"markdown": markdown.table, "latex": latex.table, "json": _json_table}
SUFFIXES = {"markdown": "md", "latex": "tex", "json": "json"}


def render(table: Table, form: str, *, bold: bool = False) -> str:
    """The table in the format of this name; ``bold`` marks the best figure of each column."""
    if form not in FORMATS:
        raise unknown("table format", form, FORMATS)
    return FORMATS[form](table, bold=bold)


def write_table(table: Table, stem: Path, formats: Iterable[str] = tuple(FORMATS)) -> list[Path]:
    """Write ``<stem>.<suffix>`` for every format; returns the files."""
    written = [stem.with_name(f"{stem.name}.{SUFFIXES[form]}") for form in formats]
    for form, path in zip(formats, written, strict=True):
        write_atomically(path, render(table, form))
    return written


def write_figures(figures: Sequence[Figure], folder: Path) -> tuple[list[Path], str | None]:
    """Write ``<key>.png`` for every figure; returns the files, and why there are none without matplotlib."""
    written = []
    try:
        for figure in figures:
            written.append(write_bytes(folder / f"{figure.key}.png", png(figure)))
    except PlotsUnavailableError as error:
        return written, str(error)
    return written, None


def write_page(section: Section, path: Path) -> tuple[list[Path], str | None]:
    """Write the section as a markdown page with its figures beside it; the page comes last in what is returned."""
    written, problem = write_figures(section.figures, path.parent)
    write_atomically(path, markdown.section(section, pictures={file.stem: file.name for file in written}))
    return [*written, path], problem


def write_bytes(path: Path, content: bytes) -> Path:
    """Write beside ``path``, then rename; returns it."""
    write_atomically(path, content)
    return path


def rich_table(table: Table) -> Any:
    """The table as one of rich's, its caption above."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable

    result = RichTable(title=table.caption or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading, numeric in zip(table.headings, table.numeric, strict=True):
        # A figure that is cut off is wrong: headings stand in several lines, and labels give way.
        text = heading.replace(" ", "\n") if numeric else heading
        result.add_column(text, justify="right" if numeric else "left", no_wrap=numeric)
    for at, (row, texts) in enumerate(zip(table.rows, table.lines(), strict=True)):
        last = row.reference and (at + 1 == len(table.rows) or not table.rows[at + 1].reference)
        result.add_row(
            *(escape(text.replace(" ± ", "\n±")) for text in texts),
            end_section=last,
            style="dim" if row.reference else None,
        )
    return result


def print_table(table: Table, console: Any) -> None:
    """The table with its notes below."""
    console.print(rich_table(table))
    for note in table.all_notes:
        console.print(note, markup=False, highlight=False)


def print_section(section: Section, console: Any) -> None:
    """Text and tables in order; figures and folded tables are left to the files."""
    for block in section.blocks:
        if isinstance(block, Text | Missing):
            style = "bold" if isinstance(block, Text) and block.strong else None
            console.print(block.text, style=style, markup=False, highlight=False)
        elif isinstance(block, Table) and not block.folded:
            print_table(block, console)
