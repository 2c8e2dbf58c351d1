"""One table of several results and the paper's rows; results that cannot be compared are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.errors import ConfigError, DataError
from rosu_llm.evaluation.wmdp.document import SCHEMA
from rosu_llm.presentation.wmdp import join
from rosu_llm.presentation.writers import render


def scores(mmlu: float, bio: float, cyber: float) -> dict[str, Any]:
    figures = {"wmdp_bio": bio, "wmdp_cyber": cyber, "mmlu": mmlu}
    return {task: {"accuracy": value, "stderr": 0.01, "questions": 100} for task, value in figures.items()}


def result(label: str, **changes: Any) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "label": label,
        "model": {"name": label, "identity": f"sha256:{label}"},
        "limited": None,
        "notes": [],
        "delta_score": {"value": 0.0625, "stderr": 0.0144, "method": "paired"},
        "base": {"name": "zephyr", "label": "zephyr", "identity": "sha256:z", "scores": scores(0.58, 0.64, 0.44)},
        "scores": scores(0.57, 0.29, 0.26),
        "leaves": {"wmdp_bio": {"hash": "sha256:b"}, "mmlu_anatomy": {"hash": "sha256:a"}},
        **changes,
    }


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(*records: dict[str, Any]) -> list[Path]:
        paths = [tmp_path / f"{at}.json" for at in range(len(records))]
        for path, record in zip(paths, records, strict=True):
            path.write_text(json.dumps(record))
        return paths

    return write


def test_base_runs_and_paper_stand_in_one_table(write: Any) -> None:
    table = join(write(result("rosu"), result("rmu", scores=scores(0.55, 0.31, 0.28))))
    assert [row.label for row in table.rows[:4]] == ["zephyr (base)", "rosu", "rmu", "Base (paper)"]
    assert [row.label for row in table.rows if row.reference] == [
        f"{name} (paper)" for name in ("Base", "SSD", "SCRUB", "LLMU", "RMU", "UAM", "ROSU")
    ]
    lines = render(table, "markdown").splitlines()
    assert lines[0] == "| method | ΔScore | MMLU | Bio | Cyber | ± ΔScore | ± MMLU | ± Bio | ± Cyber |"
    assert "| zephyr (base) | 0.580 | 0.580 | 0.640 | 0.440 | 0.014 | 0.010 | 0.010 | 0.010 |" in lines
    assert "| rosu | 0.062 | 0.570 | 0.290 | 0.260 | 0.014 | 0.010 | 0.010 | 0.010 |" in lines
    assert "| *ROSU (paper)* | 0.054 | 0.570 | 0.289 | 0.246 | – | – | – | – |" in lines
    assert any("MMLU − MMLU₀ inside ΔScore is paired" in line for line in lines)


def test_the_base_row_is_the_base_against_itself(write: Any) -> None:
    cells = join(write(result("rosu"))).rows[0].cells
    assert cells[0].value == pytest.approx(0.39 + 0.19)
    assert cells[4].value == pytest.approx(math.sqrt(2) * 0.01)


def test_the_ablations_rows_and_no_rows(write: Any) -> None:
    paths = write(result("rosu"))
    labels = [row.label for row in join(paths, "ablation").rows[2:]]
    assert labels == ["ROSU (paper)", "zero-order (paper)", "βδ only (paper)", "ηv only (paper)"]
    assert len(join(paths, "none").rows) == 2
    with pytest.raises(ConfigError, match="Unknown paper table 'tabel'"):
        join(paths, "tabel")


def test_json_is_not_rounded_and_names_its_sources(write: Any) -> None:
    rows = json.loads(render(join(write(result("rosu"))), "json"))["rows"]
    assert rows[1]["ΔScore"] == 0.0625 and rows[1]["source"] == "run" and rows[1]["identity"] == "sha256:rosu"
    assert {row["source"] for row in rows if row["reference"]} == {"paper"}


def test_latex_has_every_row(write: Any) -> None:
    text = render(join(write(result("rosu_1"))), "latex")
    assert r"rosu\_1 & 0.062 & 0.570" in text
    assert text.count(r"\\") == 1 + 9


def test_a_missing_delta_score_has_its_reason(write: Any) -> None:
    alone = result("alone", base=None, delta_score={"missing": "no base model was given: pass --base MODEL0"})
    text = render(join(write(alone)), "markdown")
    assert "| alone | – [1] | 0.570 |" in text
    assert "[1] ΔScore of alone: no base model was given: pass --base MODEL0." in text


def test_limited_results_are_marked_in_row_and_notes(write: Any) -> None:
    text = render(join(write(result("rosu", limited=5, notes=["LIMITED to 5 questions"]))), "markdown")
    assert "| rosu (limit 5) |" in text and "**LIMITED to 5 questions.**" in text


OTHER_BASE = {"name": "llama", "label": "llama", "identity": "sha256:l", "scores": scores(0.58, 0.64, 0.44)}
OTHER_SCORES = {"name": "zephyr", "label": "zephyr", "identity": "sha256:z", "scores": scores(0.59, 0.64, 0.44)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limited": 5}, "--limit none.*--limit 5: not comparable"),
        ({"leaves": {"wmdp_bio": {"hash": "sha256:b"}}}, "not asked the same questions.*mmlu_anatomy"),
        (
            {"leaves": {"wmdp_bio": {"hash": "sha256:x"}, "mmlu_anatomy": {"hash": "sha256:a"}}},
            "not asked the same questions: they differ in wmdp_bio",
        ),
        ({"base": OTHER_BASE}, "relative to the base zephyr, .* to llama"),
        ({"base": OTHER_SCORES}, "different scores of their common base"),
        ({"scores": scores(57.0, 29.0, 26.0)}, "not a fraction. Percent"),
        ({"schema": "something"}, "not a result of 'rosu eval wmdp'"),
    ],
)
def test_what_cannot_be_compared_is_refused(write: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        join(write(result("rosu"), result("rmu", **change)))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.json cannot be read"):
        join([tmp_path / "absent.json"])
    (tmp_path / "half.json").write_text('{"schema"')
    with pytest.raises(DataError, match=r"half\.json cannot be read as JSON"):
        join([tmp_path / "half.json"])
