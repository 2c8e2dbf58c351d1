"""``rosu sweep`` as a user calls it."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rosu_llm.cli.main import main
from rosu_llm.toys import toy_values
from tests.conftest import ROOT
from tests.experiments.test_config_task import NAMES

SPACE = ("--set", "rho=0.1..0.8", "--set", "learning_rate=1e-4..1e-2:log")
DEMO = ("--task", "demo", *SPACE, "--pruner", "none")
TOFU = ("--config", str(ROOT / "configs/recipes/tofu_llama-3.2-1b.yaml"), "--set", "rho=0.2,0.4")
TOFU_ONLY = ("--target", "--retain", "--data", "--fluency-model", "--eval-limit", "--report-limit")


def sweep(out: Path, *flags: str) -> int:
    return main(["sweep", "--out", str(out), "--smoke", *flags])


def trials(out: Path) -> list[dict[str, Any]]:
    content: dict[str, Any] = json.loads((out / "trials.json").read_text())
    return content["trials"]  # type: ignore[no-any-return]


def running(database: Path, number: int) -> bool:
    """Whether a trial has its settings and is at work."""
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            query = (
                "SELECT count(*) FROM trials JOIN trial_params USING (trial_id) WHERE number = ? AND state = 'RUNNING'"
            )
            return bool(connection.execute(query, (number,)).fetchone()[0] == 2)
    except sqlite3.OperationalError:
        return False


def test_killed_and_resumed_gives_what_an_undisturbed_search_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(toy_values(NAMES, tmp_path)))
    search = ["sweep", "--config", str(recipe), *SPACE, "--pruner", "none", "--trials", "2", "--out"]
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    command = [sys.executable, "-m", "rosu_llm", *search, str(broken)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 300
    while not running(broken / "study.db", 1) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert main([*search, str(broken)]) == 0
    assert main([*search, str(whole)]) == 0
    killed = trials(broken)
    assert [trial["state"] for trial in killed] == ["done", "killed", "done"]
    assert killed[2]["again_for"] == 1
    ended = [(t["settings"], t["scores"], t["figures"]) for t in killed if t["state"] == "done"]
    assert ended == [(t["settings"], t["scores"], t["figures"]) for t in trials(whole)]

    # Shown again without running, and refused under other settings.
    table = (broken / "table.md").read_text()
    capsys.readouterr()
    assert main(["sweep", "--out", str(broken), "--show"]) == 0
    assert "Ranked by Agg_MU alone. Trials: 2 done, 1 killed." in capsys.readouterr().out
    assert (broken / "table.md").read_text() == table and trials(broken) == killed
    for flags, message in ((["--kappa", "0.3"], "recipe.kappa was 0.5, now 0.3"), (["--study", "b"], "another --out")):
        assert main([*search, str(broken), *flags]) == 2
        assert message in capsys.readouterr().err
    assert trials(broken) == killed
    assert main(["train", "--config", str(broken / "best.yaml"), "--smoke"]) == 0
    assert (broken / "best" / "smoke" / "model.safetensors").is_file()


def test_every_smoke_is_a_study_of_its_own(tmp_path: Path) -> None:
    for choice in ("0.2", "0.3"):
        assert sweep(tmp_path, "--task", "demo", "--set", f"rho={choice}", "--trials", "1") == 0
        (trial,) = trials(tmp_path / "smoke")
        assert trial["settings"] == {"rho": float(choice)} and (tmp_path / "smoke" / trial["model"]).is_dir()


def test_a_tofu_recipe_is_evaluated_as_tofu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(tmp_path, *TOFU, "--trials", "1", "--keep", "all", "--held-out-questions", "20") == 0
    (trial,) = trials(tmp_path / "smoke")
    assert {"extraction_strength", "model_utility", "mia_loss", "forget_Q_A_ROUGE"} <= set(trial["figures"])
    assert trial["scores"]["Priv"] is None and trial["intermediate"].keys() == {"50"}  # one of two steps
    assert (tmp_path / "smoke" / trial["evaluation"] / "TOFU_SUMMARY.json").is_file()
    sidecar = json.loads((tmp_path / "smoke" / trial["evaluation"] / "rosu_eval.json").read_text())
    assert sidecar["conditions"]["held_out_questions"] == 1  # of the few that toys have
    assert sidecar["training"]["rho"] == trial["settings"]["rho"]
    assert (tmp_path / "smoke" / trial["model"] / "model.safetensors").is_file()
    assert "Priv: not measured (give --retain)." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task", "demo"], "Nothing to search"),
        (SPACE, "either --config RECIPE.yaml or --task demo"),
        (["--task", "tofu", *SPACE], "Unknown task 'tofu'"),
        (["--task", "demo", "--config", "x.yaml"], "either --config"),
        (["--config", "nowhere.yaml", *SPACE], "is not a file"),
        (["--task", "demo", "--space", "nowhere.yaml"], "--space 'nowhere.yaml' is not a file"),
        (["--task", "demo", "--set", "rhoo=1,2"], "Did you mean rho"),
        (["--task", "demo", *SPACE, "--rhoo", "1"], "Did you mean rho"),
        (["--task", "demo", *SPACE, "--sampler", "tep"], "Did you mean 'tpe'"),
        (["--task", "demo", *SPACE, "--sampler", "grid"], "give it a list or a step"),
        (["--task", "demo", *SPACE, "--pruner", "median", "--report-at", "2"], "no point inside a run"),
        (["--task", "demo", *SPACE, "--keep", "some"], "Unknown --keep 'some'"),
        (["--task", "demo", *SPACE, "--trials", "0"], "--trials 0 must be at least 1"),
        (["--task", "demo", *SPACE, "--timeout", "0"], "--timeout 0 leaves no time"),
        ([*TOFU, "--eval-limit", "0"], "--eval-limit 0 must be at least 1"),
        ([*TOFU, "--report-limit", "-1"], "--report-limit -1 must be at least 1"),
        *((["--task", "demo", *SPACE, flag, "1"], f"{flag} would be ignored") for flag in TOFU_ONLY),
        ([*TOFU, "--forget-data", "f.jsonl", "--retain", "r", "--data", "d"], "--retain, --data would be ignored"),
    ],
)
def test_mistakes_are_one_line_before_any_trial(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--out", str(tmp_path), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("rosu sweep: ") and error.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_a_file_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    for out in (file, file / "below"):
        for flags in ([*DEMO], [*DEMO, "--smoke"], ["--show"]):
            assert main(["sweep", "--out", str(out), *flags]) == 2
            error = capsys.readouterr().err
            assert f"--out {out} cannot be a folder, as {file} is a file" in error and error.count("\n") == 1


def test_nothing_to_show_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--out", str(tmp_path), "--show"]) == 2
    assert "holds no study" in capsys.readouterr().err


def test_several_processes_of_one_launcher_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sweep(tmp_path, *DEMO) == 2
    assert "in one process" in capsys.readouterr().err
