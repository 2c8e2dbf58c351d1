"""The demo's table, files and pictures."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..experiments.demo.contenders import COMMON, CONTENDERS, LABELS
from ..experiments.demo.run import SeedResult, average
from ..files import write_atomically
from .plots import PlotsUnavailableError, coupling_over_steps, frontier

COLUMNS = {
    "forget_prob": "forget prob",
    "forget_em": "forget EM",
    "retain_prob": "retain prob",
    "retain_em": "retain EM",
    "holdout_em": "holdout EM",
    "mia_auc": "MIA AUC",
    "seconds": "sec",
}

NOTE = (
    "forget EM and MIA AUC should match the gold row (not be as low as possible); retain should stay as before. "
    "* calibrated on people that no figure uses; not part of the paper's protocol."
)


def table(rows: Sequence[dict[str, Any]]) -> Any:
    """A rich table of the rows."""
    from rich.table import Table

    title = "Forget ten fictitious people, keep the others"
    result = Table(title=title, caption=NOTE, caption_justify="left", padding=(0, 0, 0, 1))
    result.add_column("method", no_wrap=True)
    for heading in COLUMNS.values():
        result.add_column(heading, justify="right", min_width=6)
    for row in rows:
        values = [f"{row[key]:.1f}" if key == "seconds" else f"{row[key]:.3f}" for key in COLUMNS]
        result.add_row(LABELS.get(row["method"], row["method"]), *values, end_section=row["method"] == "retain_only")
    return result


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The same table as markdown."""
    lines = ["| method | " + " | ".join(COLUMNS.values()) + " |", "|---|" + "---:|" * len(COLUMNS)]
    for row in rows:
        values = [f"{row[key]:.1f}" if key == "seconds" else f"{row[key]:.3f}" for key in COLUMNS]
        lines.append(f"| {LABELS.get(row['method'], row['method'])} | " + " | ".join(values) + " |")
    return "\n".join([*lines, "", NOTE, ""])


def write(results: Sequence[SeedResult], out: Path) -> list[Path]:
    """Write results.json, table.md, answers.md and the plots; returns what was written."""
    import torch
    import transformers

    rows = average(list(results))
    content = {
        "rows": rows,
        "per_seed": [{"seed": r.seed, "rows": r.rows} for r in results],
        "settings": {"common": COMMON, "methods": CONTENDERS},
        "logs": {name: entries for name, entries in results[0].logs.items()},
        "versions": {
            "rosu_llm": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "results.json", out / "table.md", out / "answers.md"]
    for path, text in zip(written, (json.dumps(content, indent=1), markdown(rows), answers(results[0])), strict=True):
        write_atomically(path, text)
    try:
        frontier(rows, LABELS, out / "frontier.png")
        coupling_over_steps(results[0].logs, LABELS, out / "coupling.png")
        written += [out / "frontier.png", out / "coupling.png"]
    except PlotsUnavailableError as error:
        print(error)
    return written


def answers(result: SeedResult) -> str:
    """Questions with the truth and every model's answer."""
    lines = ["# Answers before and after", ""]
    for entry in result.answers:
        lines += [f"**{entry['question']}** ({entry['split']})", ""]
        for key, text in entry.items():
            if key not in ("split", "question"):
                lines.append(f"- {LABELS.get(key, key)}: {text}")
        lines.append("")
    return "\n".join(lines)
