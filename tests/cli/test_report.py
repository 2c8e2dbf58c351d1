"""``rosu report``: what it writes where, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rosu_llm.cli.main import main
from rosu_llm.training.model_card import BEGIN, END
from tests.evaluation.saves import FIGURES, INITIAL, make_run, write_eval


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An evaluated run with a model card and a log of three steps."""
    folder = make_run(tmp_path, 0.4, FIGURES)
    log = [{"step": step, "loss/retain": 1.0 / step} for step in (1, 2, 3)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    (folder / "README.md").write_text("# mine\n\nkept\n")
    return folder


def test_one_run_gets_its_page_in_its_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--title", "My page"]) == 0
    assert "<title>My page</title>" in (run / "report.html").read_text()
    assert (run / "report.md").read_text().startswith("# My page\n")
    assert (run / "report_files" / "curve_loss_retain.png").read_bytes().startswith(b"\x89PNG")
    written = capsys.readouterr().out.splitlines()
    assert written == [f"wrote {run / name}" for name in ("report.html", "report.md", "README.md")]
    assert not [path for path in run.rglob("*") if path.name.endswith(".partial") or path.name.startswith(".curve")]


def test_several_runs_and_a_named_page(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "trainer_state.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run), str(other), "--out", "pages/both.html", "--no-card"]) == 0
    assert {path.name for path in (tmp_path / "pages").iterdir()} == {"both.html", "both.md", "both_files"}
    assert "(both_files/" in (tmp_path / "pages" / "both.md").read_text()
    assert (run / "README.md").read_text() == "# mine\n\nkept\n"
    assert not (run / "report.html").exists()


def test_the_card_is_filled_once_and_stays_the_same(run: Path, tmp_path: Path) -> None:
    target = write_eval(tmp_path / "initial", INITIAL)
    command = ["report", str(run), "--target", str(target)]
    assert main(command) == 0
    card = (run / "README.md").read_text()
    assert card.startswith("# mine\n\nkept\n")
    assert card.count(BEGIN) == card.count(END) == 1
    assert "](<report.html>)" in card and "| *Initial* | " in card
    assert main(command) == 0
    assert (run / "README.md").read_text() == card


def test_a_broken_card_is_not_touched(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "README.md").write_text(f"# mine\n{END}\n{BEGIN}\n")
    assert main(["report", str(run)]) == 2
    assert "restore or delete them, or pass --no-card" in capsys.readouterr().err
    assert (run / "README.md").read_text() == f"# mine\n{END}\n{BEGIN}\n"
    assert (run / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Nothing to report"),
        (["absent"], "is not a folder"),
        (["{run}", "--answers", "0"], "--answers 0"),
        (["{run}", "--base", "absent"], "--base absent is not a folder"),
        (["{run}", "--target", "absent"], "absent does not exist"),
    ],
)
def test_what_is_refused_in_one_line(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *(word.replace("{run}", str(run)) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rosu report: ") and error.count("\n") == 1
    assert message in error
    assert not (run / "report.html").exists()


def test_smoke_writes_below_out_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "no/such/run", "--target", "none", "--out", "out", "--smoke"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    text = (tmp_path / "out" / "report.html").read_text()
    assert "A toy demo" in text and "rosu demo" in text and "holdout EM" in text
