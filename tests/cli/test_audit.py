"""``rosu audit``: from a command to JSON, markdown and pictures, and what it says to wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rosu_llm.cli.main import main
from rosu_llm.toys import toy_values
from tests.conftest import ROOT

RECIPE = str(ROOT / "configs" / "recipes" / "tofu_llama-3.2-1b.yaml")


def written(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_orthogonality_at_smoke_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "orthogonality", "--config", RECIPE, "--out", str(tmp_path), "--smoke"]) == 0
    names = {f"audit_orthogonality.{suffix}" for suffix in ("json", "jsonl", "md", "png")}
    assert names <= written(tmp_path / "smoke") and written(tmp_path) == {"smoke"}
    document = json.loads((tmp_path / "smoke" / "audit_orthogonality.json").read_text())
    assert document["schema"] == "rosu/audit-orthogonality/1"
    assert [cell["retain_batch_size"] for cell in document["cells"]] == [1, 2, 4]
    assert "| 4 |" in capsys.readouterr().out


def test_orthogonality_of_a_configuration_with_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = toy_values({}, tmp_path)
    flags = [f"--{key.replace('_', '-')}={values[key]}" for key in ("model_name_or_path", "forget_data", "retain_data")]
    call = ["audit", "orthogonality", *flags, "--use-cpu", "true", "--out", str(tmp_path / "out")]
    small = ["--pairs", "2", "--forget-batch-size", "3", "--seed", "5"]
    assert main([*call, *small, "--batch-sizes", "2", "24"]) == 0
    document = json.loads((tmp_path / "out" / "audit_orthogonality.json").read_text())
    assert (document["seed"], document["forget_batch_size"], document["pairs"]) == (5, 3, 2)
    assert document["cells"][1]["eps_orth"]["max"] < 1e-6  # the whole retain set
    capsys.readouterr()
    assert main([*call, *small, "--batch-sizes", "25"]) == 2
    assert "rosu audit: --batch-sizes 25 does not fit the retain set of 24 samples" in capsys.readouterr().err
    assert main(["audit", "orthogonality", "--out", str(tmp_path / "out")]) == 2
    assert "model_name_or_path is missing" in capsys.readouterr().err


def test_safeguards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "safeguards", "not/there", "--out", str(tmp_path), "--smoke"]) == 0
    names = {f"audit_safeguards.{suffix}" for suffix in ("json", "md", "png")}
    assert written(tmp_path) == {*names, "smoke"}
    document = json.loads((tmp_path / "audit_safeguards.json").read_text())
    assert document["runs"][0]["fallbacks"] == 0 and document["runs"][0]["q"]["count"] == 2
    run = str(tmp_path / "smoke")
    assert main(["audit", "safeguards", run]) == 0 and names <= written(tmp_path / "smoke")
    assert main(["audit", "safeguards", run, run]) == 2
    assert "2 runs have no folder in common" in capsys.readouterr().err
    assert main(["audit", "safeguards", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_sensitivity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "sensitivity", "not/there", "--out", str(tmp_path), "--smoke"]) == 0
    names = {"audit_sensitivity.json", "audit_sensitivity.md", "sensitivity_rho.png", "sensitivity_retain_batch.png"}
    assert written(tmp_path) == {*names, "smoke"}
    assert "The paper's table on ρ is in TOFU's measures" in capsys.readouterr().out
    assert main(["audit", "sensitivity", str(tmp_path / "smoke")]) == 0 and names <= written(tmp_path / "smoke")
    assert main(["audit", "sensitivity", str(tmp_path / "nowhere")]) == 2
    assert "holds no results" in capsys.readouterr().err


def test_several_devices_go_through_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    calls = []
    monkeypatch.setattr(os, "execv", lambda *call: calls.append(call[1]) or (_ for _ in ()).throw(KeyboardInterrupt))
    arguments = ["--config", RECIPE, "--accelerate-config", "ddp", "--num-processes", "2", "--pairs", "3"]
    assert main(["audit", "orthogonality", *arguments]) == 130
    (call,) = calls
    assert call[call.index("rosu_llm") + 1 :] == ["audit", "orthogonality", "--config", RECIPE, "--pairs", "3"]


def test_a_kind_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["audit", "nonsense"])
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err
