"""TOFU's splits: which belong together, where they are read from, and whether two files match."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.data.tofu import DEFAULT_SOURCE, Splits, check_answers, check_perturbed, split_names, tofu_rows
from rosu_llm.errors import ConfigError, DataError

ROWS = [{"question": f"Question {i}?", "answer": f"Answer {i}."} for i in range(4)]
PERTURBED = [{**row, "paraphrased_answer": "Said otherwise.", "perturbed_answer": ["Wrong.", "No."]} for row in ROWS]

#: Rows of every configuration, as published.
COUNTS = {
    "full": 4000,
    **{"forget01": 40, "forget05": 200, "forget10": 400},
    **{"forget01_perturbed": 40, "forget05_perturbed": 200, "forget10_perturbed": 400},
    **{"retain99": 3960, "retain95": 3800, "retain90": 3600, "retain_perturbed": 400},
    **{"holdout01": 40, "holdout05": 200, "holdout10": 400},
    **{"real_authors": 100, "real_authors_perturbed": 100, "world_facts": 117, "world_facts_perturbed": 117},
}


def without(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key}


@pytest.mark.parametrize(("share", "rest"), [("01", "99"), ("05", "95"), ("10", "90")])
def test_splits_that_belong_together(share: str, rest: str) -> None:
    assert split_names(f"forget{share}") == Splits(
        forget=f"forget{share}",
        retain=f"retain{rest}",
        holdout=f"holdout{share}",
        forget_perturbed=f"forget{share}_perturbed",
        retain_perturbed="retain_perturbed",
        real_authors="real_authors_perturbed",
        world_facts="world_facts_perturbed",
    )


@pytest.mark.parametrize("split", ["forget20", "retain90", "forget1", ""])
def test_an_unknown_split_is_named_with_those_there_are(split: str) -> None:
    with pytest.raises(ConfigError, match="forget01, forget05, forget10"):
        split_names(split)


def test_rows_of_a_folder_and_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forget01.json").write_text(json.dumps(ROWS), encoding="utf-8")
    asked: list[Any] = []

    def download(name: str, config: str, split: str) -> list[Any]:
        asked.append((name, config, split))
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", download)
    for source in (str(tmp_path), DEFAULT_SOURCE):
        assert tofu_rows(source, "forget01") == ROWS
        assert tofu_rows(source, "forget01", limit=2) == ROWS[:2]
    assert asked == [("locuslab/TOFU", "forget01", "train")] * 2


def test_a_missing_split_and_a_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "forget01.json").write_text(json.dumps(ROWS), encoding="utf-8")
    with pytest.raises(DataError, match="no data set 'forget05'; there is: forget01"):
        tofu_rows(str(tmp_path), "forget05")
    for source in (str(tmp_path / "nowhere"), str(tmp_path / "forget01.json"), "./nowhere"):
        with pytest.raises(DataError, match=r"is not a folder.*locuslab/TOFU"):
            tofu_rows(source, "forget01")


def test_a_perturbed_file_that_matches_passes() -> None:
    check_perturbed(ROWS, PERTURBED, "forget01", "forget01_perturbed")
    bare = [without(row, "paraphrased_answer") for row in PERTURBED]
    check_perturbed(ROWS, bare, "world_facts", "world_facts_perturbed", paraphrased=False)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (PERTURBED[::-1], r"row 1 has question 'Question 3\?' where forget01 has 'Question 0\?'"),
        ([PERTURBED[0], PERTURBED[2], PERTURBED[1], PERTURBED[3]], "row 2 has question"),
        ([*PERTURBED[:2], {**PERTURBED[2], "answer": "Else."}, PERTURBED[3]], r"row 3 has answer 'Else\.'"),
        (PERTURBED[:3], "has 3 rows, not 4, so row 4 differs"),
        ([*PERTURBED, PERTURBED[0]], "has 5 rows, not 4, so row 5 differs"),
    ],
    ids=["order", "swapped", "answer", "short", "long"],
)
def test_the_first_row_that_differs_is_named(rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=f"forget01_perturbed does not match forget01: .*{message}"):
        check_perturbed(ROWS, rows, "forget01", "forget01_perturbed")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (without(PERTURBED[1], "perturbed_answer"), "perturbed_answer must be a list"),
        ({**PERTURBED[1], "perturbed_answer": []}, "perturbed_answer must be a list"),
        ({**PERTURBED[1], "perturbed_answer": "Wrong."}, "perturbed_answer must be a list"),
        ({**PERTURBED[1], "perturbed_answer": ["Wrong.", None]}, "perturbed_answer must be a list"),
        (without(PERTURBED[1], "paraphrased_answer"), "has no paraphrased_answer; its fields are"),
    ],
)
def test_a_row_without_its_other_answers_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"retain_perturbed, row 2.*{message}"):
        check_answers([PERTURBED[0], row], "retain_perturbed")


def test_the_real_files_match_each_other(shared_data: Path) -> None:
    """Counts as published; forget and retain make up the whole, held-out rows are not in it; perturbed files fit."""
    rows = {name: tofu_rows(str(shared_data / "tofu"), name) for name in COUNTS}
    assert {name: len(part) for name, part in rows.items()} == COUNTS
    for split in ("forget01", "forget05", "forget10"):
        names = split_names(split)
        check_perturbed(rows[split], rows[names.forget_perturbed], split, names.forget_perturbed)
        assert [*rows[names.retain], *rows[split]] == rows["full"]
        assert not [row for row in rows[names.holdout] if row in rows["full"]]
        check_perturbed(rows[names.retain][:400], rows["retain_perturbed"], names.retain, "retain_perturbed")
    for name in ("real_authors", "world_facts"):
        check_perturbed(rows[name], rows[f"{name}_perturbed"], name, f"{name}_perturbed", paraphrased=False)
