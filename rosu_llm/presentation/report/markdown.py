"""The report as markdown, with pictures and their data in a folder beside it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence

from ..qualitative import escape_markdown
from ..qualitative import markdown as answers
from . import blocks
from .figures import Picture


def markdown(
    report: blocks.Report, pictures: Mapping[str, Picture], folder: str = "report_files"
) -> tuple[str, dict[str, bytes]]:
    """The text, and the files it refers to by name inside ``folder``."""
    files: dict[str, bytes] = {}
    lines = [f"# {escape_markdown(report.title)}", "", escape_markdown(report.subtitle), ""]
    for section in report.sections:
        lines += [f"## {section.title}", ""]
        for block in section.blocks:
            lines += [*_block(block, pictures, folder, files), ""]
    return "\n".join(lines), files


def table(grid: blocks.Grid, *, caption: bool = True) -> str:
    """A pipe table with its notes below."""
    lines = [f"**{escape_markdown(grid.caption)}**", ""] if caption else []
    lines += [_row(grid.columns), "|" + "".join("---:|" if number else "---|" for number in grid.numeric)]
    for at, row in enumerate(grid.rows):
        if at in grid.groups:
            lines.append(_row((f"*{escape_markdown(grid.groups[at])}*", *[""] * (len(row) - 1)), escaped=True))
        cells = [escape_markdown(cell) for cell in row]
        lines.append(_row([f"**{c}**" if (at, n) in grid.marked else c for n, c in enumerate(cells)], escaped=True))
    for note in grid.notes:
        lines += ["", escape_markdown(note)]
    return "\n".join(lines)


def _row(cells: Sequence[str], *, escaped: bool = False) -> str:
    return "| " + " | ".join(cell if escaped else escape_markdown(cell) for cell in cells) + " |"


def _block(block: blocks.Block, pictures: Mapping[str, Picture], folder: str, files: dict[str, bytes]) -> Iterator[str]:
    if isinstance(block, blocks.Text):
        yield escape_markdown(block.text)
    elif isinstance(block, blocks.Missing):
        yield f"> **Note:** {escape_markdown(block.text)}"
    elif isinstance(block, blocks.Grid):
        yield table(block)
    elif isinstance(block, blocks.Answers):
        yield answers(block.choice, level=3)
    else:
        files[f"{block.key}.png"] = pictures[block.key].png
        files[f"{block.key}.csv"] = _csv(block.data)
        yield f"### {escape_markdown(block.title)}"
        yield ""
        yield f"![{escape_markdown(block.alt)}]({folder}/{block.key}.png)"
        yield ""
        yield f"{escape_markdown(block.caption)} [Data]({folder}/{block.key}.csv)"


def _csv(grid: blocks.Grid) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([grid.columns, *grid.rows])
    return text.getvalue().encode()
