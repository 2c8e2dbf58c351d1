"""The folder of ``rosu demo`` as runs: one per method, with the demo's own table and answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...experiments.demo.contenders import LABELS
from ..qualitative import Example
from .run import Demo, Run, read_object

FILE = "results.json"


def is_demo(folder: Path) -> bool:
    """Whether the folder holds a demo's result (whole or not)."""
    return (folder / FILE).is_file() and (folder / "answers.md").is_file()


def read_demo(folder: Path) -> list[Run]:
    """One run per method of the demo."""
    problems: list[str] = []
    content = read_object(folder / FILE, problems)
    rows = [row for row in content.get("rows") or [] if isinstance(row, Mapping) and "method" in row]
    if not rows:
        raise DataError(
            f"{folder} is no usable demo: {' '.join(problems) or 'results.json holds no rows.'} Run it again."
        )
    logs: Mapping[str, Any] = content.get("logs") or {}
    settings: Mapping[str, Any] = content.get("settings") or {}
    demo = Demo(rows, (folder / "answers.md").read_text(encoding="utf-8"))
    return [
        Run(
            label=LABELS.get(name, name),
            folder=folder,
            kind="rosu demo",
            settings={**(settings.get("common") or {}), **((settings.get("methods") or {}).get(name) or {})},
            versions=content.get("versions") or {},
            facts={"seconds": row["seconds"]} if "seconds" in row else {},
            log=logs.get(name) or [],
            demo=demo,
            problems=[] if logs.get(name) else ["There is no log of it."],
        )
        for row in rows
        if (name := str(row["method"])) not in ("before", "retain_only")
    ]


_QUESTION = re.compile(r"^\*\*(.+)\*\* \((\w+)\)$")
_ANSWER = re.compile(r"^- ([^:]+): ?(.*)$")


def demo_answers(demo: Demo) -> tuple[Example, ...]:
    """The forget questions of ``answers.md`` with every method's answer."""
    examples: list[Example] = []
    for part in demo.answers.split("\n\n**"):
        lines = f"**{part}".splitlines()
        heading = _QUESTION.match(lines[0])
        answers = {found[1]: found[2] for line in lines if (found := _ANSWER.match(line))}
        if heading and heading[2] == "forget" and "truth" in answers:
            truth = answers.pop("truth")
            examples.append(Example(heading[1], truth, tuple(answers.items())))
    return tuple(examples)
