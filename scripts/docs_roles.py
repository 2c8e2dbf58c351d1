"""For ``mkdocs``: Sphinx roles of the docstrings (``:class:`~rosu_llm.ROSUTrainer```) as plain code on the API page."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):<code>(~?)([\w.]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page. ``~`` asks for the last part of the name alone."""
    plain = _ROLE.sub(lambda m: f"<code>{m[2].rsplit('.', 1)[-1] if m[1] else m[2]}</code>", html)
    return plain.replace("Example::</p>", "Example:</p>")
