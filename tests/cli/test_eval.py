"""``rosu eval``: help is light, mistakes are one line, a toy run goes all the way, results join."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.cli.common import command
from rosu_llm.cli.eval import BENCHMARKS
from rosu_llm.cli.main import main
from tests.cli.test_main import imported
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["eval"], "benchmarks:"), (["eval", "-h"], "wmdp"), (["eval", "wmdp", "-h"], "--data-dir")],
    ids=str,
)
def test_help_imports_nothing_heavy(arguments: list[str], expected: str) -> None:
    text, heavy = imported(f"from rosu_llm.cli.main import main\nmain({arguments!r})")
    assert expected in text
    assert not heavy


def test_unknown_benchmarks_and_contradictions_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["eval", "nonsense"], ["eval", "wmdp"], ["eval", "wmdp", "model", "--join", "a.json"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
    assert "give either a MODEL to evaluate or --join" in capsys.readouterr().err


def test_without_lm_eval_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else find(name, *a))
    assert main(["eval", "wmdp", "some/model", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line == "rosu eval: Evaluation on WMDP and MMLU needs lm-eval: pip install 'rosu-llm[eval]'."


def test_a_toy_run_goes_all_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    words = ["eval", "wmdp", "out/zephyr-rosu", "--base", "owner/zephyr", "--num-processes", "4", "--limit", "3"]
    for _ in range(2):  # a second toy replaces the first
        assert main([*words, "--out", str(tmp_path), "--smoke"]) == 0
    shown = capsys.readouterr().out
    assert "| toy (limit 3) |" in shown and "*ROSU (paper)*" in shown
    record = json.loads((tmp_path / "smoke" / "wmdp_toy.json").read_text())
    assert record["scores"]["mmlu"]["questions"] == 6  # three of each of two subjects
    assert record["delta_score"]["method"] == "paired"
    saved = (tmp_path / "smoke" / "wmdp_toy.md").read_text()
    assert saved in shown and saved.startswith("| method | ΔScore |")

    result = str(tmp_path / "smoke" / "wmdp_toy.json")
    assert main(["eval", "wmdp", "--join", result, result, "--format", "json", "--paper", "none"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    assert [row["method"] for row in rows] == ["base (base)", "toy (limit 3)", "toy (limit 3)"]


def test_the_launcher_is_told_the_verb_and_no_autocast() -> None:
    words = ["model", "--num-processes", "2", "--limit", "5", "--expect-processes", "2"]
    call = command("ddp", 2, words, ("eval", "wmdp"), ("--mixed_precision", "no"))
    at = call.index("rosu_llm")
    assert call[at + 1 :] == ["eval", "wmdp", "model", "--limit", "5", "--expect-processes", "2"]
    assert call[call.index("--mixed_precision") + 1] == "no" and call.index("--mixed_precision") < at
    assert call[call.index("--num_processes") + 1] == "2"


def test_the_script_is_there_and_parses() -> None:
    script = ROOT / "scripts" / "wmdp_eval.sh"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "rosu eval wmdp" in script.read_text()
    assert set(BENCHMARKS) >= {"wmdp"}
