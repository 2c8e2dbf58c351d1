"""Requests one after another: each from the model before, resumable, and measured against a naive loop."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from rosu_llm.cli.main import main
from rosu_llm.errors import ConfigError
from rosu_llm.experiments.sequence import run as sequence
from rosu_llm.experiments.sequence.requests import read_requests
from rosu_llm.recipes.run import run
from rosu_llm.recipes.settings import build
from rosu_llm.toys import toy_values, write_rows
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of two steps on a toy, and the rows of two sets to forget in files ``a`` and ``b``."""
    folder = tmp_path_factory.mktemp("toy")
    values = toy_values({"method": "graddiff", "learning_rate": 1e-2, "lr_scheduler_type": "constant"}, folder)
    rows = [json.loads(line) for line in Path(values["forget_data"]).read_text().splitlines()]
    write_rows(folder / "a.jsonl", rows[:6])
    write_rows(folder / "b.jsonl", rows[6:])
    return {**values, "chat_format": None, "disable_tqdm": True, "folder": folder}


def settings(toy: dict[str, Any], out: Path, **more: Any) -> dict[str, Any]:
    return {key: value for key, value in {**toy, "output_dir": str(out), **more}.items() if key != "folder"}


def listed(tmp_path: Path, toy: dict[str, Any], text: str) -> Path:
    path = tmp_path / "requests.yaml"
    path.write_text(text.format(folder=toy["folder"]), encoding="utf-8")
    return path


BOTH = "- {folder}/a.jsonl\n- name: second\n  forget_data: {folder}/b.jsonl\n  max_steps: 3\n"


def test_each_request_starts_from_the_model_before(toy: dict[str, Any], tmp_path: Path) -> None:
    """The same weights as two runs by hand; figures as a loop over the rows finds them."""
    requests = read_requests(listed(tmp_path, toy, BOTH))
    document = sequence.run_sequence(settings(toy, tmp_path / "out"), requests)
    first, second = tmp_path / "hand-1", tmp_path / "hand-2"
    own = settings(toy, first, forget_data=f"{toy['folder']}/a.jsonl")
    run(build(own))
    more = {"model_name_or_path": str(first), "forget_data": f"{toy['folder']}/b.jsonl", "max_steps": 3}
    run(build(settings(toy, second, **more)))
    for folder, by_hand in (("01-a", first), ("02-second", second)):
        ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "out" / folder, by_hand))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    rows = {(row["after"], row["set"]): row for row in document["rows"]}
    assert {row["set"] for row in document["rows"]} == {"a", "second", "retain", "holdout"}
    states = [rows[after, "second"]["state"] for after in (0, 1, 2)]
    assert states == ["pending", "pending", "forgotten"] and rows[2, "a"]["state"] == "forgotten"
    assert rows[2, "a"]["probability"] == pytest.approx(naive(second, toy["folder"] / "a.jsonl"), rel=1e-4)
    assert rows[1, "a"]["probability"] == pytest.approx(naive(first, toy["folder"] / "a.jsonl"), rel=1e-4)
    assert rows[0, "a"]["probability"] > rows[1, "a"]["probability"]
    assert json.loads((tmp_path / "out" / "requests.json").read_text()) == document


def naive(model_folder: Path, file: Path) -> float:
    """Mean of exp(−mean loss of the answer's tokens), row by row, encoded as a run without a chat format does."""
    from rosu_llm.data.sources import load_samples
    from rosu_llm.recipes.prepare import load_tokenizer

    tokenizer = load_tokenizer(build({"model_name_or_path": str(model_folder), "output_dir": "x"}).arguments)
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    found = []
    samples = load_samples(str(file), tokenizer)
    for at in range(len(samples)):
        with torch.no_grad():
            logits = model(torch.tensor([samples[at]["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(samples[at]["labels"][1:])
        found.append(float(torch.exp(-cross_entropy(logits, labels, ignore_index=-100))))
    return sum(found) / len(found)


def test_every_set_is_read_with_the_settings_of_its_own_request(
    toy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Request 1 reads two rows, request 2 calls its fields otherwise, and the retain set is neither's."""
    rows = [json.loads(line) for line in (toy["folder"] / "b.jsonl").read_text().splitlines()]
    write_rows(tmp_path / "b.jsonl", ({"q": row["question"], "a": row["answer"]} for row in rows))
    head = [json.loads(line) for line in (toy["folder"] / "a.jsonl").read_text().splitlines()]
    write_rows(tmp_path / "two.jsonl", head[:2])
    write_rows(tmp_path / "three.jsonl", head[:3])
    write_rows(tmp_path / "other.jsonl", head[2:])
    trusted: list[bool] = []
    real = sequence.load_tokenizer
    monkeypatch.setattr(
        sequence, "load_tokenizer", lambda given: trusted.append(given.trust_remote_code) or real(given)
    )

    def found(limit: int) -> dict[str, float]:
        """The figures before the first request, at which the sequence is stopped."""
        text = f"- forget_data: {toy['folder']}/a.jsonl\n  limit: {limit}\n  retain_data: {tmp_path}/other.jsonl\n"
        text += f"- forget_data: {tmp_path}/b.jsonl\n  question_key: q\n  answer_key: a\n"
        requests = read_requests(listed(tmp_path, toy, text))
        with pytest.raises(KeyboardInterrupt):
            sequence.run_sequence(settings(toy, tmp_path / "out", trust_remote_code=True), requests, stop)
        written = json.loads((tmp_path / "out" / "requests.json").read_text())["rows"]
        return {row["set"]: row["probability"] for row in written}

    def stop(_: Any) -> Any:
        raise KeyboardInterrupt

    model = Path(toy["model_name_or_path"])
    first = found(2)
    assert first["a"] == pytest.approx(naive(model, tmp_path / "two.jsonl"), rel=1e-4)
    assert first["b"] == pytest.approx(naive(model, toy["folder"] / "b.jsonl"), rel=1e-4)
    for name in ("retain", "holdout"):
        assert first[name] == pytest.approx(naive(model, Path(toy[f"{name}_data"])), rel=1e-4)
    assert trusted == [True]
    changed = found(3)  # not finished, so it may be changed, and what was measured otherwise is not kept
    assert changed["a"] == pytest.approx(naive(model, tmp_path / "three.jsonl"), rel=1e-4)
    assert abs(changed["a"] / first["a"] - 1) > 1e-3


def test_a_stopped_sequence_goes_on_and_may_grow(toy: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    requests = read_requests(listed(tmp_path, toy, BOTH))
    trained: list[str] = []

    def stopping(after: int) -> Callable[[Any], Any]:
        def train(recipe: Any) -> Any:
            if len(trained) == after:
                raise KeyboardInterrupt
            trained.append(Path(recipe.config.output_dir).name)
            return run(recipe)

        return train

    values = settings(toy, out)
    with pytest.raises(KeyboardInterrupt):
        sequence.run_sequence(values, requests, stopping(1))
    half = json.loads((out / "requests.json").read_text())
    assert trained == ["01-a"] and {row["after"] for row in half["rows"]} == {0, 1}
    whole = sequence.run_sequence(values, requests, stopping(9))
    assert trained == ["01-a", "02-second"] and whole["rows"][: len(half["rows"])] == half["rows"]
    assert sequence.run_sequence(values, requests, stopping(2)) == whole  # nothing is left to do
    longer = read_requests(listed(tmp_path, toy, BOTH + "- name: third\n  forget_data: {folder}/a.jsonl\n"))
    grown = sequence.run_sequence(values, longer, stopping(9))
    assert trained[2:] == ["03-third"] and {row["after"] for row in grown["rows"]} == {0, 1, 2, 3}
    with pytest.raises(ConfigError, match=r"request 1: content was .* requests may only be added to the end"):
        sequence.run_sequence(values, longer[1:])
    with pytest.raises(ConfigError, match=r"settings.learning_rate was 0.01, now 0.5"):
        sequence.run_sequence({**values, "learning_rate": 0.5}, longer)


@pytest.mark.parametrize("newest", [2, 3])
def test_an_unfinished_request_goes_on_from_its_checkpoint(
    toy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: int
) -> None:
    """Killed before its model was saved, with steps left or without: the same weights as without the kill."""
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    requests = read_requests(listed(tmp_path, toy, "- {folder}/a.jsonl\n"))
    sequence.run_sequence(settings(toy, tmp_path / "whole", **saving), requests)
    with monkeypatch.context() as patch:
        patch.setattr("rosu_llm.recipes.run.save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sequence.run_sequence(settings(toy, tmp_path / "killed", **saving), requests)
    checkpoints = {path.name: path for path in (tmp_path / "killed" / "01-a").glob("checkpoint-*")}
    assert checkpoints.keys() == {"checkpoint-2", "checkpoint-3"}
    if newest == 2:
        shutil.rmtree(checkpoints["checkpoint-3"])
    began: list[Any] = []

    def watched(recipe: Any) -> Any:
        began.append(recipe.config.resume_from_checkpoint)
        return run(recipe)

    sequence.run_sequence(settings(toy, tmp_path / "killed", **saving), requests, watched)
    assert [bool(each) for each in began] == [newest == 2]
    ours, theirs = (load_file(tmp_path / name / "01-a" / "model.safetensors") for name in ("killed", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_shipped_list_and_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "configs" / "requests" / "tofu_growing.yaml"
    assert [request.name for request in read_requests(path)] == ["forget01", "forget05", "forget10"]
    recipe = ["--config", str(ROOT / "configs" / "recipes" / "local_files.yaml")]
    assert main(["train", *recipe, "--requests", str(path), "--smoke", "--output-dir", str(tmp_path)]) == 0
    assert "3 of 3 requests" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "smoke"), "--out", str(tmp_path / "page")]) == 0
    text = next((tmp_path / "page").glob("*.html")).read_text(encoding="utf-8")
    assert "Sequence of requests" in text and "Exact match" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "an empty list"),
        ("forget: a", "must hold a list"),
        ("- {name: x}", "Request 1 of .* needs 'forget_data"),
        ("- 3", "Request 1 of .* is a int"),
        ("- a.jsonl\n- b/a.jsonl", "the name 'a' twice"),
        ("- {forget_data: a.jsonl, output_dir: x}", "sets output_dir, which the sequence decides"),
        ("- {", "is not valid YAML"),
        ("- a.jsonl\n- data/retain.jsonl", "Request 2 of .* is called 'retain', as the run's own retain set"),
        ("- {forget_data: a.jsonl, name: holdout}", "Request 1 of .* is called 'holdout'"),
    ],
)
def test_lists_that_cannot_be_used(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read_requests(path)


def test_requests_are_named_by_the_rows_they_name(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- data:forget[:10]\n- data/forget.jsonl[10:]\n- data:forget\n")
    assert [each.name for each in read_requests(path)] == ["forget-0-10", "forget-10-end", "forget"]
    path.write_text('- {forget_data: a.jsonl, name: "authors [2024]"}\n')
    assert [each.name for each in read_requests(path)] == ["authors-2024"]


def test_runs_that_cannot_be_chained(toy: dict[str, Any], tmp_path: Path) -> None:
    requests = read_requests(listed(tmp_path, toy, BOTH))
    with pytest.raises(ConfigError, match="lora_r=2 leaves an adapter"):
        sequence.run_sequence(settings(toy, tmp_path / "out", lora_r=2), requests)
    with pytest.raises(ConfigError, match="representation level"):
        levels = {"forget_loss": "representation", "retain_loss": "representation"}
        sequence.run_sequence(settings(toy, tmp_path / "out", **levels), requests)
    with pytest.raises(ConfigError, match="is not a file"):
        read_requests(tmp_path / "nowhere.yaml")
    assert not (tmp_path / "out").exists()
