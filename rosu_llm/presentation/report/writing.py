"""The report on disk, and its place in the runs' model cards.

The HTML page loads nothing: style and pictures are inside, its policy forbids all else.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from ...errors import RosuError
from ...files import write_atomically
from ...training.model_card import with_report
from ..blocks import Report
from ..drawing import Picture, draw
from ..qualitative import LEGEND, Choice, mark
from ..writers import markdown, write_bytes


class JinjaUnavailableError(RosuError, ImportError):
    """jinja2 is not installed."""


def write(report: Report, out: Path) -> list[Path]:
    """Write the page, the markdown with its pictures, and the answers alone; returns the three documents.

    ``out`` is the page when it ends in ``.html``, else a folder. The page is written last: if it exists, all files do.
    """
    page = out if out.suffix == ".html" else out / "report.html"
    folder = page.with_name(f"{page.stem}_files")
    figures = [figure for section in report.sections for figure in section.figures]
    pictures = {figure.key: draw(figure) for figure in figures}
    for figure in figures:
        write_bytes(folder / f"{figure.key}.png", pictures[figure.key].png)
        data = io.StringIO()
        csv.writer(data, lineterminator="\n").writerows([figure.data.headings, *figure.data.lines()])
        write_atomically(folder / f"{figure.key}.csv", data.getvalue())
    written = [page, page.with_suffix(".md")]
    write_atomically(written[-1], markdown.report(report, folder.name))
    everything = [block for section in report.sections for block in section.blocks]
    choices = [block for block in everything if isinstance(block, Choice) and block.examples]
    if choices:
        written.append(page.with_name("qualitative.md"))
        write_atomically(written[-1], "\n".join(map(markdown.answers, choices)))
    write_atomically(page, _page(report, pictures))
    return written


def _page(report: Report, pictures: Mapping[str, Picture]) -> str:
    """The page; ``pictures`` by the keys of the figures.

    The template engine escapes all text; only our own style sheet is taken as it is.
    """
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
    except ImportError as error:
        raise JinjaUnavailableError("Reports need jinja2: pip install 'rosu-llm[report]'.") from error
    folder = files("rosu_llm.presentation") / "templates"
    environment = Environment(
        loader=FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css = (folder / "style.css").read_text(encoding="utf-8")
    name = f"sha256-{_base64(hashlib.sha256(css.encode()).digest())}"  # of the style in the content security policy
    environment.globals.update(
        legend=LEGEND,
        mark=mark,
        pictures=pictures,
        data_uri=lambda svg: f"data:image/svg+xml;base64,{_base64(svg.encode())}",
        kind=lambda block: type(block).__name__,
    )
    made: str = environment.get_template("page.html").render(report=report, css=css, css_hash=name)
    return made


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def update_cards(report: Report, folders: Sequence[Path], page: Path) -> list[Path]:
    """Put link and main table into the model card of every run that has one; returns the cards that changed."""
    changed = []
    for folder in dict.fromkeys(folders):
        card = folder / "README.md"
        if not card.is_file():
            continue
        link = Path(os.path.relpath(page.absolute(), folder.absolute()))
        also = f"also as [markdown](<{link.with_suffix('.md').as_posix()}>), made by `rosu report`."
        lines = [f"[{markdown.escape(report.title)}](<{link.as_posix()}>), {also}"]
        if table := report.main.get(folder):
            lines += ["", f"**{markdown.escape(table.caption)}**", "", markdown.table(table, escaped=True)]
        before = card.read_text(encoding="utf-8")
        after = with_report(before, "\n".join(lines))
        if after != before:
            write_atomically(card, after)
            changed.append(card)
    return changed
