"""Tables, sections and reports as markdown.

Files that are read as text, too, escape only what would break a table. A report shows what models and runs say about
themselves, so there everything is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..blocks import Missing, Report, Section, Table, Text
from ..qualitative import AGREES, DIFFERS, LEGEND, PLAIN, Choice, mark

_SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$]|^(?:[+-]|#+)(?= )|(?<=^\d)[.)](?= ))")
_SIGNS = {AGREES: "**", DIFFERS: "~~", PLAIN: ""}


def escape(text: str) -> str:
    """Text that markdown shows as it is, on one line, also inside a table."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def table(table: Table, *, bold: bool = False, escaped: bool = False) -> str:
    """A pipe table with its notes below; ``bold`` marks the best figure of each column."""
    marked = table.marked | (table.best() if bold else set())

    def cell(text: str) -> str:
        return escape(text) if escaped else text.replace("|", "\\|")

    lines = ["| " + " | ".join(map(cell, table.headings)) + " |"]
    lines.append("|" + "".join("---:|" if number else "---|" for number in table.numeric))
    for at, (row, texts) in enumerate(zip(table.rows, table.lines(), strict=True)):
        if at in table.groups:
            lines.append(f"| *{cell(table.groups[at])}* |" + "  |" * len(table.columns))
        label, *shown = map(cell, texts)
        for column in {column for found, column in marked if found == at and column}:
            figure, rest = cell(table.figure(row.cells[column - 1])), shown[column - 1]
            shown[column - 1] = f"**{figure}**{rest.removeprefix(figure)}"
        lines.append("| " + " | ".join([f"*{label}*" if row.reference else label, *shown]) + " |")
    for note in table.all_notes:
        lines += ["", escape(note) if escaped else note]
    return "\n".join([*lines, ""])


def section(
    section: Section, *, level: int = 1, pictures: Mapping[str, str] | None = None, escaped: bool = False
) -> str:
    """The section under a heading of this level.

    ``pictures`` are addresses of images by the keys of figures; figures without one are left out. What is escaped is
    part of a report, where a data file stands beside every image.
    """
    prose, heading = escape if escaped else str, "#" * (level + 1)
    lines = ["#" * level + f" {section.title}", ""]
    for block in section.blocks:
        if isinstance(block, Text):
            lines += [f"**{prose(block.text)}**" if block.strong else prose(block.text), ""]
        elif isinstance(block, Missing):
            lines += [f"> **Note:** {prose(block.text)}", ""]
        elif isinstance(block, Table):
            lines += [f"{heading} {prose(block.caption)}", ""] if block.caption else []
            lines.append(table(block, escaped=escaped))
        elif isinstance(block, Choice):
            lines += [answers(block, level=level + 1), ""]
        elif image := (pictures or {}).get(block.key):
            data = f" [Data]({image.removesuffix('.png')}.csv)" if escaped else ""
            lines += [f"{heading} {prose(block.title)}", f"\n![{prose(block.alt)}]({image})\n"]
            lines += [prose(block.caption) + data, ""]
    return "\n".join(lines)


def report(report: Report, folder: str) -> str:
    """The whole report; images and data files are in ``folder`` under the keys of their figures."""
    lines = [f"# {escape(report.title)}", "", escape(report.subtitle), ""]
    for part in report.sections:
        pictures = {figure.key: f"{folder}/{figure.key}.png" for figure in part.figures}
        lines.append(section(part, level=2, pictures=pictures, escaped=True))
    return "\n".join(lines)


def answers(choice: Choice, *, level: int = 1) -> str:
    """The examples under a heading of this level; always escaped, as models wrote them."""
    lines = ["#" * level + " Answers before and after", "", choice.how, ""]
    lines += [f"{LEGEND} **Bold** agrees, ~~struck~~ differs.", ""]
    for example in choice.examples:
        lines += [f"**Prompt:** {escape(example.question)}", ""]
        for name, text in (("Ground truth", example.truth), *example.answers):
            spans = mark(" ".join(text.split()), example.truth, example.question)
            # not through escape as a whole: it would strip the spaces at a span's ends
            said = "".join(_SIGNS[s.kind] + _SPECIAL.sub(r"\\\1", s.text) + _SIGNS[s.kind] for s in spans)
            lines.append(f"- *{escape(name)}*: {said or '(empty)'}")
        lines += ["", *([escape(example.remark), ""] if example.remark else [])]
    return "\n".join(lines)
