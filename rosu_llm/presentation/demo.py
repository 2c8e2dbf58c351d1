"""The demo: its table, where the models land, the coupling along the runs, and answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..experiments.demo.task import COLUMNS, LABELS, DemoDocument
from ..files import write_atomically
from .blocks import Figure, Row, Table, TableCell, number
from .charts import Point, frontier
from .curves import COSINE, RETAIN_LOSS, curves_figure, read_curve
from .qualitative import Example
from .writers import write_figures
from .writers.markdown import table as pipe_table

NOTE = (
    "forget EM and MIA AUC should match the gold row (not be as low as possible); retain should stay as before. "
    "* forgets until the level of people whom no figure uses; not part of the paper's protocol."
)
#: Rows that are no method.
REFERENCES = ("before", "retain_only")


def label_of(method: Any) -> str:
    """The method's name for readers."""
    return LABELS.get(str(method), str(method))


def demo_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each model; a figure that is not there is a dash."""

    def cell(key: str, value: Any) -> TableCell:
        known = value if isinstance(value, int | float) else None
        return TableCell(text=None if known is None else number(known, 1)) if key == "seconds" else TableCell(known)

    made = [Row(label_of(row["method"]), tuple(cell(key, row.get(key)) for key in COLUMNS)) for row in rows]
    caption = "Forget ten fictitious people, keep the others"
    return Table(tuple(COLUMNS.values()), tuple(made), (NOTE,), caption=caption, digits=3)


def demo_landing(rows: Sequence[Mapping[str, Any]], places: Mapping[str, int] | None = None) -> Figure | None:
    """How much of the forgotten each model knows against how well an attack tells it; the gold model is the goal.

    ``places`` are the numbers of runs by label.
    """
    points: list[Point] = []
    for row in rows:
        label, x, y = label_of(row["method"]), row.get("forget_em"), row.get("mia_auc")
        if isinstance(x, int | float) and isinstance(y, int | float):
            place = sum(not point.reference for point in points) if places is None else places.get(label)
            known = {"reference": row["method"] in REFERENCES, "goal": row["method"] == "retain_only"}
            points.append(Point(label, x, y, place, **known))
    titles = ("forget EM: answer tokens reproduced", "MIA AUC: attack on the forgotten people")
    return frontier("landing", "Landing: rosu demo", points, titles) if points else None


def answers(entries: Sequence[Mapping[str, str]], split: str = "forget") -> tuple[Example, ...]:
    """The questions of this split with the true answer and every model's."""
    return tuple(
        Example(
            entry["question"],
            entry["truth"],
            tuple((label_of(name), text) for name, text in entry.items() if name not in ("split", "question", "truth")),
        )
        for entry in entries
        if entry["split"] == split
    )


def write_demo(document: DemoDocument, out: Path) -> tuple[list[Path], str | None]:
    """Write results.json, table.md, answers.md and the figures; returns the files, and why there are no figures."""
    lines = ["# Answers before and after", ""]
    for entry in document["answers"]:
        lines += [f"**{entry['question']}** ({entry['split']})", ""]
        lines += [f"- {label_of(key)}: {text}" for key, text in entry.items() if key not in ("split", "question")]
        lines.append("")
    texts = {
        "results.json": json.dumps(document, indent=1),
        "table.md": pipe_table(demo_table(document["rows"])),
        "answers.md": "\n".join(lines),
    }
    for name, text in texts.items():
        write_atomically(out / name, text)
    panels = {}
    for quantity in (COSINE, RETAIN_LOSS):
        logs = enumerate(document["logs"].items())
        read = [read_curve(log, quantity.key, label_of(name), at) for at, (name, log) in logs]
        panels[quantity] = [curve for curve in read if curve is not None]
    figures = [demo_landing(document["rows"]), curves_figure("coupling", "Coupling and retain loss", panels)]
    written, problem = write_figures([figure for figure in figures if figure], out)
    return [*(out / name for name in texts), *written], problem
