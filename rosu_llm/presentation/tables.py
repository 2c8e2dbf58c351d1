"""Methods × columns as markdown, LaTeX (booktabs) or JSON: one table, one rounding, the same notes in each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import unknown

MISSING = "–"


@dataclass(frozen=True)
class Cell:
    """A figure, or None with the number of the footnote that says why there is none.

    Attributes:
        spread: standard deviation of the figure, shown after it.
        text: what to show where there is no figure, in place of a dash.
    """

    value: float | None
    footnote: int | None = None
    spread: float | None = None
    text: str | None = None


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        reference: a model to compare with rather than a method; never the best.
        details: more about the row, for JSON only.
    """

    label: str
    cells: tuple[Cell, ...]
    reference: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """Rows under columns; higher is better in each. Footnotes are numbered from 1, notes are not.

    Attributes:
        heading: what a row is, in lower case.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    footnotes: tuple[str, ...] = ()
    heading: str = "method"


def number(value: float, digits: int) -> str:
    """The one place where figures are rounded."""
    return f"{value:.{digits}f}"


def best_cells(table: Table, digits: int) -> set[tuple[int, int]]:
    """(row, column) of the largest figure of each column as shown, ties included, reference rows left out."""
    best: set[tuple[int, int]] = set()
    for column in range(len(table.columns)):
        shown = {
            at: float(number(value, digits))
            for at, row in enumerate(table.rows)
            if not row.reference and (value := row.cells[column].value) is not None
        }
        best |= {(at, column) for at, value in shown.items() if value == max(shown.values())}
    return best


def markdown(table: Table, *, digits: int = 2, bold: bool = False) -> str:
    """A pipe table with its notes below."""
    best = best_cells(table, digits) if bold else set()
    lines = [f"| {table.heading} | " + " | ".join(table.columns) + " |", "|---|" + "---:|" * len(table.columns)]
    for at, row in enumerate(table.rows):
        shown = []
        for column, cell in enumerate(row.cells):
            text = (cell.text or MISSING) if cell.value is None else number(cell.value, digits)
            text = f"**{text}**" if (at, column) in best else text
            text += "" if cell.spread is None else f" ± {number(cell.spread, digits)}"
            shown.append(text if cell.footnote is None else f"{text} [{cell.footnote}]")
        label = row.label.replace("|", "\\|")
        lines.append(f"| *{label}* | " if row.reference else f"| {label} | ")
        lines[-1] += " | ".join(shown) + " |"
    for note in table.notes:
        lines += ["", note]
    for at, note in enumerate(table.footnotes, 1):
        lines += ["", f"[{at}] {note}"]
    return "\n".join([*lines, ""])


def latex(table: Table, *, digits: int = 2, bold: bool = False) -> str:
    """A booktabs tabular, reference rows above a rule, notes below it."""
    best = best_cells(table, digits) if bold else set()
    heads = " & ".join(rf"\textbf{{{_heading(column)}}}" for column in table.columns)
    lines = [
        rf"\begin{{tabular}}{{l{'c' * len(table.columns)}}}",
        r"\toprule",
        rf"\textbf{{{table.heading.capitalize()}}} & {heads} \\",
    ]
    above: bool | None = None
    for at, row in enumerate(table.rows):
        if row.reference != above:
            lines.append(r"\midrule")
            above = row.reference
        shown = []
        for column, cell in enumerate(row.cells):
            text = _escape(cell.text or MISSING) if cell.value is None else number(cell.value, digits)
            text = rf"\textbf{{{text}}}" if (at, column) in best else text
            text += "" if cell.spread is None else rf"\,{{\scriptsize$\pm${number(cell.spread, digits)}}}"
            shown.append(text if cell.footnote is None else rf"{text}\textsuperscript{{{cell.footnote}}}")
        label = rf"\textit{{{_escape(row.label)}}}" if row.reference else _escape(row.label)
        lines.append(f"{label} & " + " & ".join(shown) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    notes = [_escape(note) for note in table.notes]
    notes += [rf"\textsuperscript{{{at}}} {_escape(note)}" for at, note in enumerate(table.footnotes, 1)]
    lines += [rf"\par{{\footnotesize {note}}}" for note in notes]
    return "\n".join([*lines, ""])


def as_json(table: Table, *, digits: int = 2, bold: bool = False) -> str:
    """Unrounded figures with everything known about each row; ``digits`` and ``bold`` do not apply."""
    rows = []
    for row in table.rows:
        cells = dict(zip(table.columns, row.cells, strict=True))
        values = {column: cell.text if cell.value is None else cell.value for column, cell in cells.items()}
        spread = {column: cell.spread for column, cell in cells.items() if cell.spread is not None}
        why = {
            column: table.footnotes[cell.footnote - 1] for column, cell in cells.items() if cell.footnote is not None
        }
        more = {"spread": spread} if spread else {}
        rows.append(
            {table.heading: row.label, **values, "reference": row.reference, "missing": why, **more, **row.details}
        )
    content = {"columns": table.columns, "rows": rows, "notes": table.notes}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


FORMATS: dict[str, Callable[..., str]] = {"markdown": markdown, "latex": latex, "json": as_json}


def render(table: Table, form: str, *, digits: int = 2, bold: bool = False) -> str:
    """The table in the format of this name."""
    if form not in FORMATS:
        raise unknown("table format", form, FORMATS)
    return FORMATS[form](table, digits=digits, bold=bold)


_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "–": "--",
    "−": "$-$",
    "✓": r"\checkmark{}",
    "✗": r"$\times$",
    "±": r"$\pm$",
    **{letter: rf"$\{name}$" for letter, name in zip("βδηρκτ", "beta delta eta rho kappa tau".split(), strict=True)},
    **{character: f"\\{character}" for character in "_%&#${}"},
}


def _escape(text: str) -> str:
    return "".join(_SPECIAL.get(character, character) for character in text)


def _heading(column: str) -> str:
    """``Agg_MU`` with its subscript."""
    found = re.fullmatch(r"([^\W_]+)_([^\W_]+)(.*)", column)
    return rf"{found[1]}$_{{\text{{{found[2]}}}}}${_escape(found[3])}" if found else _escape(column)
