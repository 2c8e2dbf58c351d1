"""Several WMDP results and the paper's rows in one table; results that cannot be compared are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError, unknown
from ..evaluation.wmdp.document import CHANCE, SCHEMA
from ..files import read_json
from .blocks import Footnotes, Row, Table, TableCell, printed

FIGURES = ("ΔScore", "MMLU", "Bio", "Cyber")
SCORES = ("mmlu", "wmdp_bio", "wmdp_cyber")

#: The paper's rows for Zephyr-7B-β by the name of the table; its ablation prints no ΔScore.
PAPER = {"table": printed("wmdp_table"), "ablation": printed("wmdp_ablation"), "none": {}}


def read_record(path: Path) -> dict[str, Any]:
    """A result of ``rosu eval wmdp``, checked to be one, in fractions."""
    record = read_json(path)
    if record.get("schema") != SCHEMA:
        raise DataError(f"{path} is not a result of 'rosu eval wmdp' (its schema is {record.get('schema')!r}).")
    for owner in (record, record["base"] or {"scores": {}}):
        for task, score in owner["scores"].items():
            if not 0 <= score["accuracy"] <= 1:
                raise DataError(f"{path}: the accuracy of {task} is {score['accuracy']}, not a fraction. Percent?")
    return record


def join(paths: Sequence[Path], paper: str = "table") -> Table:
    """One table: the base, the runs in the order given, the paper's rows."""
    if paper not in PAPER:
        raise unknown("paper table", paper, PAPER)
    records = [read_record(path) for path in paths]
    base = _check_comparable(paths, records)
    footnotes = Footnotes()
    rows = [_base_row(base)] if base else []
    rows += [_run_row(record, path, footnotes) for path, record in zip(paths, records, strict=True)]
    rows += [
        Row(f"{name} (paper)", tuple(map(TableCell, (*figures, *[None] * len(FIGURES)))), True, {"source": "paper"})
        for name, figures in PAPER[paper].items()
    ]
    columns = (*FIGURES, *(f"± {name}" for name in FIGURES))
    return Table(columns, tuple(rows), tuple(_notes(records, paper)), tuple(footnotes), digits=3)


def _check_comparable(paths: Sequence[Path], records: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the base that the results have in common; None if none of them has one."""
    first = records[0]
    mine = {name: leaf["hash"] for name, leaf in first["leaves"].items()}
    for path, record in zip(paths, records, strict=True):
        if first["limited"] != record["limited"]:
            limits = [str(r["limited"] or "none") for r in (first, record)]
            raise DataError(f"{paths[0]} has --limit {limits[0]}, {path} has --limit {limits[1]}: not comparable.")
        theirs = {name: leaf["hash"] for name, leaf in record["leaves"].items()}
        if mine != theirs:
            name = min(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            raise DataError(f"{paths[0]} and {path} were not asked the same questions: they differ in {name}.")
    found = [(path, record["base"]) for path, record in zip(paths, records, strict=True) if record["base"]]
    for path, base in found[1:]:
        origin, common = found[0]
        if base["identity"] != common["identity"]:
            raise DataError(
                f"{origin} is relative to the base {common['name']}, {path} to {base['name']}: their ΔScores are not "
                "comparable. Join runs of one base."
            )
        if base["scores"] != common["scores"]:
            raise DataError(f"{origin} and {path} hold different scores of their common base: evaluate one again.")
    return found[0][1] if found else None


def _base_row(base: Mapping[str, Any]) -> Row:
    """The base against itself: the MMLU term is exactly 0."""
    scores = base["scores"]
    value = error = None
    if set(SCORES) <= set(scores):
        value = sum(abs(scores[task]["accuracy"] - CHANCE) for task in SCORES[1:])
        errors = [scores[task]["stderr"] for task in SCORES[1:]]
        error = None if None in errors else sum(e**2 for e in errors) ** 0.5
    details = {"source": "run", "identity": base["identity"]}
    return Row(f"{base['label']} (base)", _cells(value, error, scores, None), False, details)


def _run_row(record: Mapping[str, Any], path: Path, footnotes: Footnotes) -> Row:
    delta = record["delta_score"]
    reason = f"ΔScore of {record['label']}: {delta['missing']}." if "missing" in delta else None
    limited = f" (limit {record['limited']})" if record["limited"] else ""
    details = {"source": "run", "file": str(path), "identity": record["model"]["identity"], "delta_score": delta}
    cells = _cells(delta.get("value"), delta.get("stderr"), record["scores"], footnotes.mark(reason))
    return Row(f"{record['label']}{limited}", cells, False, details)


def _cells(
    value: float | None, error: float | None, scores: Mapping[str, Mapping[str, Any]], footnote: int | None
) -> tuple[TableCell, ...]:
    measured = [scores.get(task, {}) for task in SCORES]
    figures = [TableCell(value, footnote), *(TableCell(score.get("accuracy")) for score in measured)]
    return (*figures, TableCell(error), *(TableCell(score.get("stderr")) for score in measured))


def _notes(records: Sequence[Mapping[str, Any]], paper: str) -> list[str]:
    first = records[0]
    asked = ", ".join(f"{task} {score['questions']}" for task, score in first["scores"].items())
    notes = [f"**{note}.**" for note in dict.fromkeys(note for record in records for note in record["notes"])]
    notes.append(f"Questions: {asked}; 0-shot, fractions right. Best: ΔScore 0, Bio and Cyber at chance ({CHANCE}).")
    methods = sorted({r["delta_score"]["method"] for r in records if "method" in r["delta_score"]})
    if methods:
        notes.append(f"± are standard errors; that of MMLU − MMLU₀ inside ΔScore is {' or '.join(methods)}.")
    if PAPER[paper]:
        notes.append("Rows marked (paper) are printed figures for Zephyr-7B-β, not runs.")
    return notes
