"""A table of the paper's vision half (``vision_*.json``): our figures, and the paper's beside them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..files import write_json
from ..vision.table import VisionDocument
from ..vision.task import COLUMNS
from .blocks import Figure, Footnotes, Row, Section, Table, TableCell, Text, shown
from .charts import Panel, Series, along
from .writers import write_figures, write_table

logger = logging.getLogger(__name__)

_PROTOCOLS = {"classwise": "Class-wise forgetting", "random": "Random forgetting"}


def vision_section(document: VisionDocument, title: str, key: str) -> Section:
    """One table in the paper's shape."""
    setup, footnotes = document["setup"], Footnotes()
    rows = tuple(_row(row, footnotes) for row in document["rows"])
    beside = any(row["paper"] for row in document["rows"])
    width = 2 * len(COLUMNS) if beside else len(COLUMNS)
    columns = (*COLUMNS.values(), *(f"paper {name}" for name in COLUMNS.values()))[:width]
    rows = tuple(Row(row.label, row.cells[:width], row.reference, row.details) for row in rows)
    train, test, classes = setup["images"]
    seeds = ", ".join(map(str, setup["seeds"]))
    over = f"seeds {seeds}"
    if setup["protocol"] == "classwise":
        one = setup.get("forget_class")
        over = f"classes {seeds}" if one is None else f"{over} of forgetting class {one}"
    notes = [
        f"Per cent, mean ± standard deviation (n − 1) over {over}. ΔAcc: Σ |difference to Retrain| of the "
        "means of RA, FA and TA. MIA-Eff: forget images that the attack calls non-members; Retrain's is the target. "
        "min: minutes of unlearning alone, without measuring; of training for before and Retrain.",
    ]
    if beside:
        notes.append(
            "paper: ResNet-18 of width 64 (Tiny-ImageNet: VGG), all images, 200 epochs, A6000; its figures are "
            "comparable with ours only at that size."
        )
    what = (
        f"{setup['model']} of width {setup['width']}, {train} training and {test} test images of {classes} classes, "
        f"{setup['pretrain_epochs']} epochs; {setup['validation_share']:.0%} of the training images held out for "
        "selection."
    )
    caption = f"{_PROTOCOLS[setup['protocol']]}: {title}"
    table = Table(columns, rows, tuple(notes), tuple(footnotes), caption=caption, digits=2)
    shown_tables = [table]
    if beside:  # twelve columns are too many for a terminal: there they stand below each other
        half = len(COLUMNS)
        ours = _columns(table, slice(0, half), caption)
        theirs = replace(
            _columns(table, slice(half, None), f"{caption}, as the paper prints it"), notes=(), footnotes=()
        )
        shown_tables = [replace(table, folded=True), ours, theirs]
    chosen = [
        Text(f"{row['label']}: " + ", ".join(f"{k} {shown(v)}" for k, v in row["selected"].items()))
        for row in document["rows"]
        if row.get("selected")
    ]
    figures = [_curves(document, caption, key, table)] if any(row.get("curve") for row in document["rows"]) else []
    return Section(key, caption, [Text(what), *shown_tables, *figures, *chosen])


def _columns(table: Table, taken: slice, caption: str) -> Table:
    rows = tuple(replace(row, cells=row.cells[taken]) for row in table.rows)
    columns = tuple(name.removeprefix("paper ") for name in table.columns[taken])
    return replace(table, columns=columns, rows=rows, caption=caption)


def _curves(document: VisionDocument, caption: str, key: str, table: Table) -> Figure:
    """RA and FA over epochs, with Retrain's as level lines."""
    gold = next(row for row in document["rows"] if row["name"] == "retrain")["figures"]
    panels = []
    for name in ("RA", "FA"):
        series = [
            Series(row["label"], [(x, y, spread) for x, y, spread in row["curve"][name]])
            for row in document["rows"]
            if row.get("curve")
        ]
        panels.append(Panel(name, series, {"Retrain": gold[name]["mean"]} if name in gold else {}))
    return along(f"{key}_epochs", caption, "epoch", panels, table)


def _row(row: dict[str, Any], footnotes: Footnotes) -> Row:
    mark = footnotes.mark("failed: " + "; ".join(row["errors"]) if row["errors"] else None)
    cells = []
    for name in COLUMNS:
        found = row["figures"].get(name)
        if found is None:
            cells.append(TableCell(footnote=mark, text="failed" if mark else None))
        else:
            cells.append(TableCell(found["mean"], mark, found["std"]))
        mark = None
    for name in COLUMNS:
        printed = (row["paper"] or {}).get(name)
        pair = printed if isinstance(printed, list) else [printed]
        cells.append(TableCell(pair[0], spread=pair[1] if len(pair) > 1 else None))
    details = {"selected": row.get("selected", {}), "trials": row.get("trials", [])}
    return Row(row["label"], tuple(cells), row["name"] in ("before", "retrain"), details)


def write_vision(document: VisionDocument, section: Section, folder: Path) -> list[Path]:
    """The document, its table as markdown, LaTeX and JSON, and with matplotlib its curves; returns what was written."""
    path = write_json(folder / f"vision_{section.key}.json", dict(document))
    figures, missing = write_figures(section.figures, folder)
    if missing:
        logger.warning("%s", missing)
    return [path, *write_table(section.tables[0], folder / section.key), *figures]
