"""Several WMDP results and the paper's rows in one table; results that cannot be compared are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError, unknown
from ..evaluation.wmdp.delta_score import CHANCE
from ..evaluation.wmdp.run import SCHEMA
from ..files import read_json
from .tables import Cell, Row, Table

FIGURES = ("ΔScore", "MMLU", "Bio", "Cyber")
SCORES = ("mmlu", "wmdp_bio", "wmdp_cyber")
DIGITS = 3

#: The paper's figures for Zephyr-7B-β as printed, fractions: (ΔScore, MMLU, Bio, Cyber); its ablation prints no ΔScore.
PAPER: dict[str, dict[str, tuple[float | None, float, float, float]]] = {
    "table": {
        "Base": (0.577, 0.581, 0.637, 0.440),
        "SSD": (0.526, 0.407, 0.502, 0.350),
        "SCRUB": (0.400, 0.512, 0.438, 0.393),
        "LLMU": (0.624, 0.447, 0.595, 0.395),
        "RMU": (0.101, 0.566, 0.310, 0.276),
        "UAM": (0.077, 0.564, 0.293, 0.233),
        "ROSU": (0.054, 0.570, 0.289, 0.246),
    },
    "ablation": {
        "ROSU": (None, 0.570, 0.289, 0.246),
        "zero-order": (None, 0.577, 0.420, 0.261),
        "βδ only": (None, 0.255, 0.266, 0.246),
        "ηv only": (None, 0.252, 0.251, 0.266),
    },
    "none": {},
}


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
    for path, record in zip(paths, records, strict=True):
        _check_comparable(paths[0], records[0], path, record)
    bases = _same_base(paths, records)
    footnotes: list[str] = []
    rows = [_base_row(bases[0])] if bases else []
    rows += [_run_row(record, path, footnotes) for path, record in zip(paths, records, strict=True)]
    rows += [
        Row(f"{name} (paper)", tuple(map(Cell, (*figures, *[None] * len(FIGURES)))), True, {"source": "paper"})
        for name, figures in PAPER[paper].items()
    ]
    columns = (*FIGURES, *(f"± {name}" for name in FIGURES))
    return Table(columns, tuple(rows), tuple(_notes(records, paper)), tuple(footnotes))


def _check_comparable(first_path: Path, first: Mapping[str, Any], path: Path, record: Mapping[str, Any]) -> None:
    if first["limited"] != record["limited"]:
        limits = [str(r["limited"] or "none") for r in (first, record)]
        raise DataError(f"{first_path} has --limit {limits[0]}, {path} has --limit {limits[1]}: not comparable.")
    mine, theirs = ({name: leaf["hash"] for name, leaf in r["leaves"].items()} for r in (first, record))
    if mine != theirs:
        name = min(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        raise DataError(f"{first_path} and {path} were not asked the same questions: they differ in {name}.")


def _same_base(paths: Sequence[Path], records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    found = [(path, record["base"]) for path, record in zip(paths, records, strict=True) if record["base"]]
    for path, base in found[1:]:
        if base["identity"] != found[0][1]["identity"]:
            raise DataError(
                f"{found[0][0]} is relative to the base {found[0][1]['name']}, {path} to {base['name']}: "
                "their ΔScores are not comparable. Join runs of one base."
            )
        if base["scores"] != found[0][1]["scores"]:
            raise DataError(f"{found[0][0]} and {path} hold different scores of their common base: evaluate one again.")
    return [base for _, base in found]


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


def _run_row(record: Mapping[str, Any], path: Path, footnotes: list[str]) -> Row:
    delta, footnote = record["delta_score"], None
    if "missing" in delta:
        text = f"ΔScore of {record['label']}: {delta['missing']}."
        if text not in footnotes:
            footnotes.append(text)
        footnote = footnotes.index(text) + 1
    limited = f" (limit {record['limited']})" if record["limited"] else ""
    details = {"source": "run", "file": str(path), "identity": record["model"]["identity"], "delta_score": delta}
    cells = _cells(delta.get("value"), delta.get("stderr"), record["scores"], footnote)
    return Row(f"{record['label']}{limited}", cells, False, details)


def _cells(
    value: float | None, error: float | None, scores: Mapping[str, Mapping[str, Any]], footnote: int | None
) -> tuple[Cell, ...]:
    measured = [scores.get(task, {}) for task in SCORES]
    figures = [Cell(value, footnote), *(Cell(score.get("accuracy")) for score in measured)]
    return (*figures, Cell(error), *(Cell(score.get("stderr")) for score in measured))


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
