"""The rows of the paper's Table 3: which are run, with what, and how they are shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rosu_llm.cli.main import main
from rosu_llm.errors import ConfigError
from rosu_llm.experiments.contest import CONTESTANTS, search_variants
from rosu_llm.experiments.demo.world import REFUSALS, build_world
from rosu_llm.experiments.table3 import BESIDES, ROWS, chosen_rows, table_contest
from rosu_llm.presentation.blocks import printed
from tests.conftest import ROOT


def test_all_names_every_row_of_ours_in_the_papers_order() -> None:
    rows = chosen_rows(["all"])
    assert rows == {**ROWS, **BESIDES}
    paper = [name for name in printed("tofu") if name in rows]
    assert list(ROWS) == paper
    assert set(ROWS.values()) | set(BESIDES.values()) <= set(CONTESTANTS)


def test_rows_and_contestants_can_be_named() -> None:
    assert chosen_rows(["ROSU", "altpo", "graddiff"]) == {
        "GradDiff": "graddiff",
        "AltPO": "altpo",
        "ROSU": "rosu_paper",
    }
    assert chosen_rows(["gu"]) == {"GU": "gu"}
    with pytest.raises(ConfigError, match="method 'Alt'"):
        chosen_rows(["Alt"])


def test_every_row_has_the_same_number_of_trials_over_the_same_rates() -> None:
    contest = table_contest(chosen_rows(["all"]), "demo", None, None, {})
    drawn = {
        name: [(v.settings["learning_rate"], v.settings["num_train_epochs"]) for v in search_variants(name, contest)]
        for name in contest.names
    }
    assert len({tuple(own) for own in drawn.values()}) == 1
    assert len(next(iter(drawn.values()))) == 6


def test_files_of_third_answers_go_to_the_rows_that_read_them() -> None:
    rows = chosen_rows(["AltPO", "IdkNLL", "NPO"])
    contest = table_contest(rows, "config", 2, [3], {"alternates": "a.jsonl", "refusals": "r.txt"})
    assert contest.own == {"altpo": {"alternates": "a.jsonl"}, "idk_nll": {"refusals": "r.txt"}}
    assert search_variants("altpo", contest)[0].settings["alternates"] == "a.jsonl"
    with pytest.raises(ConfigError, match=r"altpo needs other answers.*rosu data alternates"):
        table_contest(rows, "config", None, None, {})


def test_the_embedded_people_have_refusals_and_alternates_without_unknown_words() -> None:
    small = {"forget": 1, "retain": 1, "calibration": 1, "holdout": 1}
    world, plain = build_world(0, people=small, refusals=True), build_world(0, people=small)
    unknown = world.tokenizer.unk_token_id
    for kind in ("refusals", "alternates"):
        third = world.third_answers(kind, 0)
        assert len(third) == len(world.data["forget"])
        assert not any(unknown in sample["input_ids"] for own in third for sample in own)
    assert plain.tokenizer.unk_token_id in plain.tokenizer(REFUSALS[0])["input_ids"]
    assert plain.data["forget"].samples == world.data["forget"].samples  # the other words keep their numbers


def test_the_command_runs_prints_the_papers_shape_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "--methods", "IdkNLL", "AltPO", "--task", "demo", "--out", str(tmp_path), "--smoke"]
    assert main(words) == 0
    out = tmp_path / "smoke"
    text = (out / "comparison.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith(("| *Init. ft.* |", "| *Retain* |", "| AltPO |"))]
    assert len(lines) == 4  # AltPO in the search, too
    assert [cell.strip() for cell in lines[2].split("|")][-5:-1] == ["0.05", "0.67", "0.02", "0.94"]
    assert "the two halves do not compare" in text
    assert "Not in this table: GradDiff" in text
    document = json.loads((out / "comparison.json").read_text())
    assert [len(entry["trials"]) for entry in document["entries"]] == [1, 1]
    cells = {path: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    capsys.readouterr()
    assert main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in (out / "cells").iterdir()} == cells
    assert "kept" in capsys.readouterr().out


def test_a_recipe_of_tofu_is_compared_by_tofus_scores(tmp_path: Path) -> None:
    recipe = ROOT / "configs" / "recipes" / "tofu" / "graddiff.yaml"
    words = ["--config", str(recipe), "--alternates", "made.jsonl", "--out", str(tmp_path), "--smoke"]
    assert main(["sweep", "--methods", "AltPO", *words]) == 0
    document = json.loads((tmp_path / "smoke" / "comparison.json").read_text())
    assert document["task"]["task"] == "tofu"
    assert set(document["entries"][0]["per_seed"][0]["scores"]) == {"Agg_MU", "Mem", "Util", "Priv", "Agg"}


def test_options_of_a_search_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "--methods", "all", "--task", "demo", "--out", str(tmp_path)]
    assert main([*words, "--set", "rho=0.1..0.8"]) == 2
    assert "--set has no meaning with --methods" in capsys.readouterr().err
    assert main(["sweep", "--task", "demo", "--out", str(tmp_path), "--seeds", "1"]) == 2
    assert "--seeds is for --methods" in capsys.readouterr().err
