"""MUSE: from a command to files, a killed run, what a text becomes, and what is said to wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.cli.main import main
from rosu_llm.evaluation.muse import evaluate as muse
from rosu_llm.evaluation.muse.data import encode_text
from rosu_llm.toys import save_model, toy_world, write_muse, write_rows


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("muse")
    world = toy_world()
    for seed, name in enumerate(("model", "retain")):
        save_model(folder / name, world, seed)
    write_muse(folder / "data", world.corpus.items)
    return folder


def call(toy: Path, out: Path, *more: str, data: Path | None = None) -> list[str]:
    where = ["--data", str(data or toy / "data"), "--chat-format", "Llama-2-7b-hf", "--out", str(out)]
    return ["eval", "muse", str(toy / "model"), *where, *more]


def test_a_killed_run_goes_on_and_other_conditions_are_refused(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = call(toy, tmp_path, "--retain", str(toy / "retain"))
    with monkeypatch.context() as patch:
        patch.setattr(muse, "_memorised", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(flags) == 130
    place = tmp_path / "references" / "retain" / "MUSE_EVAL.json"
    assert set(json.loads(place.read_text())) == set(muse.GENERATED)  # what was finished is on disk
    asked: list[str] = []
    real = muse.MusePasses._answers

    def watched(self: Any, metric: str, part: str, new: int) -> Any:
        asked.append(metric)
        return real(self, metric, part, new)

    monkeypatch.setattr(muse.MusePasses, "_answers", watched)
    assert main(flags) == 0
    assert asked == list(muse.GENERATED)  # of the model alone: the retain model's answers were kept
    printed = capsys.readouterr().out
    assert "VerbMem ↓" in printed and "| *retain* |" in printed
    found = json.loads((tmp_path / "MUSE_SUMMARY.json").read_text())
    theirs = json.loads((tmp_path / "references" / "retain" / "MUSE_SUMMARY.json").read_text())
    assert set(found) == set(muse.METRICS)
    a, r = found["mia_min_k"], theirs["mia_min_k"]
    assert found["privleak"] == pytest.approx(100 * (r - a) / (1 - r + 1e-10))
    capsys.readouterr()
    assert main([*flags, "--limit", "1"]) == 2
    assert "limit was None, now 1" in capsys.readouterr().err


def test_the_report_shows_it(toy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(call(toy, run / "evals_muse_news", "--metrics", "extraction_strength")) == 0
    (run / "README.md").write_text("---\nlibrary_name: transformers\n---\n", encoding="utf-8")
    assert main(["report", str(run), "--out", str(tmp_path / "page"), "--no-card"]) == 0
    text = next((tmp_path / "page").glob("*.html")).read_text(encoding="utf-8")
    assert "MUSE News" in text and "ES ↓" in text


def test_a_text_behind_a_prefix() -> None:
    tokenizer = toy_world().tokenizer
    sample = encode_text("Who was it ?", "In Cusco .", tokenizer, space=True)
    prefix = len(sample.prompt_ids)
    assert sample.input_ids[:prefix] == sample.prompt_ids and sample.labels[:prefix] == [-100] * prefix
    alone = encode_text("", "In Cusco .", tokenizer, space=False)
    assert alone.labels[0] == -100 and alone.labels[1:] == alone.input_ids[1:]  # the first token has no prediction


def test_bad_input(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, flags in (
        ("Unknown split of MUSE 'Newspapers'", ["--split", "Newspapers"]),
        ("Unknown MUSE metric 'verbmem'", ["--metrics", "verbmem"]),
        ("--limit 0 must be at least 1", ["--limit", "0"]),
        ("does not exist", ["--retain", str(tmp_path / "nowhere" / "x")]),
    ):
        capsys.readouterr()
        assert main(call(toy, tmp_path / "out", *flags)) == 2
        assert words in capsys.readouterr().err
    write_rows(tmp_path / "data" / "knowmem" / "forget_qa_icl.jsonl", [{"question": "q", "answer": "a"}])
    write_rows(tmp_path / "data" / "knowmem" / "forget_qa.jsonl", [{"question": "q", "text": "a"}])
    assert main(call(toy, tmp_path / "out", data=tmp_path / "data")) == 2
    assert "but no 'answer': is this MUSE's data?" in capsys.readouterr().err
    (tmp_path / "retain.json").write_text("{}", encoding="utf-8")
    assert main(call(toy, tmp_path / "out", "--retain", str(tmp_path / "retain.json"))) == 2
    assert "has no mia_min_k with an agg_value" in capsys.readouterr().err
