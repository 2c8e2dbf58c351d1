"""For ``mkdocs``: the help of every verb on the page of commands, and Sphinx roles of docstrings as plain code."""

from __future__ import annotations

import contextlib
import io
import os
import re
from typing import Any

_COMMAND = re.compile(r"<!-- rosu (.+ -h) -->")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):<code>(~?)([\w.]+)</code>")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with each page: ``<!-- rosu VERB -h -->`` becomes what that command prints."""
    return _COMMAND.sub(lambda match: f"```text\n{_printed(match[1].split())}```", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page. ``~`` asks for the last part of the name alone."""
    plain = _ROLE.sub(lambda m: f"<code>{m[2].rsplit('.', 1)[-1] if m[1] else m[2]}</code>", html)
    return plain.replace("Example::</p>", "Example:</p>")


def _printed(words: list[str]) -> str:
    from rosu_llm.cli.main import main

    os.environ["COLUMNS"] = "96"
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(words)
    return out.getvalue()
