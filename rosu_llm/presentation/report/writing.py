"""The report on disk, and its place in the runs' model cards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ...files import write_atomically
from ...training.model_card import with_report
from ..qualitative import escape_markdown
from ..qualitative import markdown as answers_page
from .blocks import Answers, Figure, Report
from .figures import draw
from .html import html
from .markdown import markdown, table


def write(report: Report, out: Path) -> list[Path]:
    """Write the page, the markdown with its pictures, and the answers alone; returns the three documents.

    ``out`` is the page when it ends in ``.html``, else a folder. The page is written last: where it is, all is.
    """
    page = out if out.suffix == ".html" else out / "report.html"
    folder = page.with_name(f"{page.stem}_files")
    everything = [block for section in report.sections for block in section.blocks]
    pictures = {block.key: draw(block) for block in everything if isinstance(block, Figure)}
    text, files = markdown(report, pictures, folder.name)
    for name, content in files.items():
        _write_bytes(folder / name, content)
    choices = [block.choice for block in everything if isinstance(block, Answers) and block.choice.examples]
    written = [page, page.with_suffix(".md")]
    write_atomically(page.with_suffix(".md"), text)
    if choices:
        written.append(page.with_name("qualitative.md"))
        write_atomically(written[-1], "\n".join(map(answers_page, choices)))
    write_atomically(page, html(report, pictures))
    return written


def _write_bytes(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(content)
    os.replace(partial, path)


def update_cards(report: Report, folders: Sequence[Path], page: Path) -> list[Path]:
    """Put link and main table into the model card of every run that has one; returns the cards that changed."""
    changed = []
    for folder in dict.fromkeys(folders):
        card = folder / "README.md"
        if not card.is_file():
            continue
        before = card.read_text(encoding="utf-8")
        after = with_report(before, _card_block(report, folder, page))
        if after != before:
            write_atomically(card, after)
            changed.append(card)
    return changed


def _card_block(report: Report, folder: Path, page: Path) -> str:
    links = [page, page.with_suffix(".md")]
    names = [Path(os.path.relpath(link.absolute(), folder.absolute())).as_posix() for link in links]
    lines = [
        f"[{escape_markdown(report.title)}](<{names[0]}>), also as [markdown](<{names[1]}>), made by `rosu report`."
    ]
    if folder in report.main:
        lines += ["", table(report.main[folder])]
    return "\n".join(lines)
