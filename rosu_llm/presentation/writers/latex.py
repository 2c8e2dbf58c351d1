"""Tables as LaTeX (booktabs)."""

from __future__ import annotations

import re

from ..blocks import Table, number


def table(table: Table, *, bold: bool = False) -> str:
    """A booktabs tabular, reference rows above a rule, notes below it."""
    best = table.best() if bold else set()
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
        shown = [rf"\textit{{{_escape(row.label)}}}" if row.reference else _escape(row.label)]
        for column, cell in enumerate(row.cells, 1):
            text = _escape(table.figure(cell))
            text = rf"\textbf{{{text}}}" if (at, column) in best else text
            text += "" if cell.spread is None else rf"\,{{\scriptsize$\pm${number(cell.spread, table.digits)}}}"
            shown.append(text if cell.footnote is None else rf"{text}\textsuperscript{{{cell.footnote}}}")
        lines.append(" & ".join(shown) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    notes = [_escape(note) for note in table.notes]
    notes += [rf"\textsuperscript{{{at}}} {_escape(note)}" for at, note in enumerate(table.footnotes, 1)]
    return "\n".join([*lines, *(rf"\par{{\footnotesize {note}}}" for note in notes), ""])


_TEXT = zip("\\~^|<>", "backslash asciitilde asciicircum bar less greater".split(), strict=True)
_SYMBOLS = zip("βδηρκτ±✗", "beta delta eta rho kappa tau pm times".split(), strict=True)
_SPECIAL = str.maketrans(
    {character: f"\\{character}" for character in "_%&#${}"}
    | {sign: rf"\text{name}{{}}" for sign, name in _TEXT}
    | {sign: rf"$\{name}$" for sign, name in _SYMBOLS}
    | {"–": "--", "−": "$-$", "✓": r"\checkmark{}"}
)


def _escape(text: str) -> str:
    return text.translate(_SPECIAL)


def _heading(column: str) -> str:
    """``Agg_MU`` with its subscript."""
    found = re.fullmatch(r"([^\W_]+)_([^\W_]+)(.*)", column)
    return rf"{found[1]}$_{{\text{{{found[2]}}}}}${_escape(found[3])}" if found else _escape(column)
