"""``rosu ablate``: from a command to tables and pictures, interrupted or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.cli.main import main
from tests.conftest import ROOT

SMOKE = ("--smoke", "--max-steps", "2")


def ablate(out: Path, *flags: str) -> int:
    return main(["ablate", "--out", str(out), *SMOKE, *flags])


def cells(out: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in (out / "cells").glob("*.json")]
    return {f"{record['label']} {record['seed']}": record for record in found}


def test_a_grid_and_an_axis_with_one_impossible_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--grid", "components", "--axis", "rho=0.2,-1,0.4", "--seeds", "0")
    assert ablate(tmp_path, *flags) == 1
    text = capsys.readouterr().out
    assert text.count("done ") == 2 + 4 + 2
    assert text.count("failed axes: ρ = -1.0, seed 0") == 1
    assert "1 of 9 cells failed" in text
    table = (tmp_path / "axes.md").read_text()
    assert "| ρ = -1.0 | failed [1] | – |" in table and "[1] failed: rho=-1.0 is no perturbation radius" in table
    assert "| ηv only | ✗ | ✓ | 0.0" in (tmp_path / "components.md").read_text()
    for name in ("components.tex", "components.json", "axes.tex", "axes.json"):
        assert (tmp_path / name).stat().st_size > 200
    assert (tmp_path / "axes_rho.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "components.png").exists()

    assert ablate(tmp_path, *flags, "--format", "json") == 1
    text = capsys.readouterr().out
    assert "done " not in text and text.count("kept ") == 8
    assert ablate(tmp_path, "--axis", "rho=0.4,0.2") == 0


def test_killed_and_resumed_gives_what_an_undisturbed_run_gives(tmp_path: Path) -> None:
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    command = [sys.executable, "-m", "rosu_llm", "ablate", *SMOKE, "--axis", "rho=0.1,0.2,0.3", "--out", str(broken)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 240
    while len([*(broken / "cells").glob("*.json")]) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    survived = {name: record["seconds"] for name, record in cells(broken).items()}
    assert 3 <= len(survived) < 5
    times = {path: path.stat().st_mtime_ns for path in (broken / "cells").glob("*.json")}

    assert ablate(broken, "--axis", "rho=0.1,0.2,0.3") == 0
    assert ablate(whole, "--axis", "rho=0.1,0.2,0.3") == 0
    assert all(path.stat().st_mtime_ns == before for path, before in times.items())
    assert {n: r["metrics"] for n, r in cells(broken).items()} == {n: r["metrics"] for n, r in cells(whole).items()}
    assert (broken / "axes.md").read_text() == (whole / "axes.md").read_text()


def test_a_configuration_is_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model_name_or_path: m\nforget_data: f\nretain_data: r\nrho: 0.3\nseed: 7\noutput_dir: x\n")
    flags = ["ablate", "--config", str(recipe), "--smoke", "--axis", "method=rosu,ft", "--out", str(tmp_path / "out")]
    assert main([*flags, "--keep-models"]) == 0
    records = cells(tmp_path / "out")
    assert set(records) == {"before 0", "axes: method = rosu 7", "axes: method = ft 7"}
    record = records["axes: method = rosu 7"]
    assert record["settings"]["rho"] == 0.3
    assert [*(tmp_path / "out" / record["model"]).glob("*.safetensors")]
    assert main([*flags, "--rho", "0.5"]) == 0
    assert cells(tmp_path / "out").keys() == records.keys() | set()
    assert len([*(tmp_path / "out" / "cells").iterdir()]) == 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--grid", "componets"], "Did you mean 'components'"),
        (["--format", "html"], "Unknown table format 'html'"),
        (["--task", "tofu"], "Unknown task 'tofu'"),
        (["--task", "demo", "--config", "x.yaml"], "both name a task"),
        (["--config", "nowhere.yaml"], "is not a file"),
        (["--seeds", "0", "0"], "every seed once"),
        (["--seed", "3"], "use --seeds"),
        (["--output-dir", "x"], "use --out"),
        (["--rhoo", "0.1"], "Did you mean rho"),
        (["--axis", "rho=0.1", "--rho", "0.2"], "both set rho"),
        (["stray"], "'stray' is not understood"),
    ],
)
def test_mistakes_are_one_line_before_any_cell(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ablate(tmp_path, *flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("rosu ablate: ") and error.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_several_processes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ablate(tmp_path) == 2
    assert "in one process" in capsys.readouterr().err
