"""The README.md that goes with an unlearned model: what was done to it, with which settings, and what a report found.

The report's place is between two HTML comments, so that ``rosu report`` can fill it and leave the rest as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .. import __version__
from ..errors import DataError

BEGIN, END = "<!-- rosu report: begin -->", "<!-- rosu report: end -->"
_PLACEHOLDER = "`rosu report FOLDER`, with this folder, writes a page about the run and puts its main table here."


def model_card(
    *,
    name: str,
    base_model: str | None,
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
    metrics: Mapping[str, float],
    tags: list[str],
) -> str:
    """Markdown with the metadata header that model hubs read."""
    header: dict[str, Any] = {"library_name": "transformers", "tags": ["unlearning", "rosu-llm", *tags]}
    if base_model:
        header["base_model"] = base_model
    lines = [
        "---",
        yaml.safe_dump(header, sort_keys=False, allow_unicode=True).strip(),
        "---",
        "",
        f"# {name}",
        "",
        f"Made by unlearning with `rosu_llm` {__version__}, method `{settings.get('method', 'rosu')}`"
        + (f", starting from `{base_model}`." if base_model else "."),
    ]
    if settings.get("calibrate", "off") != "off":
        lines += ["", "The amplification was **calibrated**; this is not part of the paper's protocol."]
    if settings.get("forget_until", "off") != "off":
        lines += ["", "How deep to forget was **bounded**; this is not part of the paper's protocol."]
    lines += ["", _report_block(_PLACEHOLDER)]
    lines += ["", "## Settings", "", "| setting | value |", "|---|---|"]
    lines += [f"| `{key}` | `{value}` |" for key, value in settings.items()]
    if metrics:
        lines += ["", "## Last logged values", "", "| quantity | value |", "|---|---|"]
        lines += [f"| `{key}` | {value:.6g} |" for key, value in metrics.items()]
    lines += ["", "## Versions", ""] + [f"- {key} {value}" for key, value in versions.items()]
    lines += [
        "",
        "## Method",
        "",
        "Retain-Orthogonal Surrogate Unlearning, from *Retain-Neutral Surrogates for Min–Max Unlearning* "
        "(Cai et al.). Unlearning is approximate: evaluate before relying on it.",
        "",
    ]
    return "\n".join(lines)


def with_report(card: str, content: str) -> str:
    """The card with ``content`` in the report's place, which is made at the end of a card that has none."""
    block = _report_block(content)
    places = card.count(BEGIN), card.count(END)
    if places == (0, 0):
        return f"{card.rstrip()}\n\n{block}\n" if card.strip() else f"{block}\n"
    start, end = card.find(BEGIN), card.find(END)
    if places != (1, 1) or end < start:
        raise DataError(
            f"The model card's comments {BEGIN} and {END} are not one pair in this order: restore or delete them, or "
            "pass --no-card."
        )
    return card[:start] + block + card[end + len(END) :]


def _report_block(content: str) -> str:
    # The comments of a content would end the block early.
    inner = content.strip().replace(BEGIN, "").replace(END, "")
    return f"{BEGIN}\n## Report\n\n{inner}\n{END}"


@dataclass(frozen=True)
class Card:
    """What a card of :func:`model_card` says; empty where it says nothing."""

    base_model: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


_SETTING = re.compile(r"^\| `([^`]+)` \| `(.*)` \|$", re.MULTILINE)
_VERSION = re.compile(r"^- (\S+) (\S+)$", re.MULTILINE)


def read_card(path: Path) -> Card:
    """The card at ``path``, as far as it can be understood: anybody may have edited or written it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return Card()
    try:
        header = yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else None
    except yaml.YAMLError:
        header = None
    base = header.get("base_model") if isinstance(header, dict) else None
    return Card(
        base if isinstance(base, str) else None,
        dict(_SETTING.findall(_under(text, "Settings"))),
        dict(_VERSION.findall(_under(text, "Versions"))),
    )


def _under(text: str, heading: str) -> str:
    """The text between this heading and the next."""
    _, found, rest = text.partition(f"\n## {heading}\n")
    return rest.split("\n## ")[0] if found else ""
