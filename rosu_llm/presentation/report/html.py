"""The report as one HTML page that asks for nothing: style and pictures are inside, and its policy forbids the rest."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files

from ...errors import RosuError
from ..qualitative import LEGEND, mark
from . import blocks
from .figures import Picture


class JinjaUnavailableError(RosuError, ImportError):
    """jinja2 is not installed."""


def html(report: blocks.Report, pictures: Mapping[str, Picture]) -> str:
    """The page; ``pictures`` by the keys of the figures.

    The template engine escapes all text; only our own style sheet is taken as it is.
    """
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
    except ImportError as error:
        raise JinjaUnavailableError("Reports need jinja2: pip install 'rosu-llm[report]'.") from error
    folder = files(__package__) / "templates"
    environment = Environment(
        loader=FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css = (folder / "style.css").read_text(encoding="utf-8")
    environment.globals.update(
        legend=LEGEND, mark=mark, pictures=pictures, data_uri=_data_uri, kind=lambda block: type(block).__name__
    )
    page: str = environment.get_template("page.html").render(report=report, css=css, css_hash=_hash(css))
    return page


def _hash(text: str) -> str:
    """The style's name in the content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _data_uri(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
