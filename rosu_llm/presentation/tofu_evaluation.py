"""What an evaluation ends with: the paper's summary, and every single figure, as tables on screen and on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..evaluation.results import FILES, read_result
from ..evaluation.tofu.metrics import METRICS
from ..files import read_json, write_atomically
from .tables import Cell, Row, Table, render
from .tofu import tofu_table

DIGITS = {"table": 3, "figures": 4}
SUFFIXES = {"md": "markdown", "tex": "latex", "json": "json"}


def report(out: Path, *, retain: Path | None, target: Path | None, transform: str) -> str:
    """Write ``table.*`` and ``figures.*`` into ``out`` from the results there and of the references; as markdown."""
    files = {"Model": out / FILES[0], "Retain": retain, "Initial": target}
    there = {name: path for name, path in files.items() if path is not None}
    read = {name: read_result(path) for name, path in there.items()}
    summary = tofu_table(
        [read["Model"]], retain=read.get("Retain"), target=read.get("Initial"), transform=transform, details=True
    )
    tables = {"table": summary.table, "figures": figures_table(there)}
    for stem, table in tables.items():
        for suffix, form in SUFFIXES.items():
            write_atomically(out / f"{stem}.{suffix}", render(table, form, digits=DIGITS[stem]))
    return "\n".join(render(table, "markdown", digits=DIGITS[stem]) for stem, table in tables.items())


def figures_table(files: Mapping[str, Path]) -> Table:
    """A row for each metric that one of the results has, a column for each result."""
    contents = {name: read_json(path) for name, path in files.items()}
    rows = []
    for metric in METRICS:
        entries = [content.get(metric) for content in contents.values()]
        values = [entry.get("agg_value") if isinstance(entry, dict) else entry for entry in entries]
        if any(value is not None for value in values):
            rows.append(Row(metric, tuple(map(Cell, values))))
    return Table(tuple(contents), tuple(rows), ("Names and definitions are OpenUnlearning's.",), heading="metric")
