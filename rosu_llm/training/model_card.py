"""The README.md that goes with an unlearned model: what was done to it, with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from .. import __version__


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
