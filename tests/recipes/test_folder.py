"""One owner per output folder: nothing is mixed, replaced unasked, or shared by two runs; stale results are noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rosu_llm.cli.main import main
from rosu_llm.errors import ConfigError, DataError
from rosu_llm.evaluation.model_identity import find_model, of_other_weights
from rosu_llm.evaluation.tofu.document import FILES, SIDECAR
from rosu_llm.evaluation.tofu.results import check_current, read_result
from rosu_llm.files import digest, weight_digests
from rosu_llm.presentation.report.reading import read_runs
from rosu_llm.recipes.folder import LOCK, MANIFEST, locked, occupant
from tests.conftest import ROOT
from tests.models import tiny_llama
from tests.training.tiny_world import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def train(world: World, out: Path, **changes: object) -> int:
    return main(["train", *world.flags(out, **{"max_steps": 1, "save_strategy": "no", **changes})])


def weights(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("first", ["model", "adapter"])
def test_starting_over_leaves_nothing_of_the_run_before(first: str, world: World, tmp_path: Path) -> None:
    """Else an adapter lies beside a whole model, and an evaluation scores a mixture of both."""
    out = tmp_path / "out"
    kinds = [{"lora_r": 2}, {}] if first == "adapter" else [{}, {"lora_r": 2}]
    assert train(world, out, **kinds[0]) == 0
    (out / "audit_safeguards.json").write_text("{}")
    (out / "notes.txt").write_text("mine")
    assert train(world, out, overwrite=True, **kinds[1]) == 0
    expected = {"model.safetensors"} if first == "adapter" else {"adapter_model.safetensors"}
    assert weights(out) == expected
    assert (out / "adapter_config.json").is_file() == (first == "model")
    assert (out / "config.json").is_file() == (first == "adapter")
    assert not (out / "audit_safeguards.json").exists() and (out / "notes.txt").is_file()
    find_model(str(out), adapters=True)
    files = json.loads((out / MANIFEST).read_text())["files"]
    assert expected < files.keys() and "notes.txt" not in files and MANIFEST not in files
    assert all(digest(out / name) == value for name, value in files.items())
    assert not (out / LOCK).exists()


def test_a_finished_model_is_not_replaced_unasked(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert train(world, out) == 0
    before = weight_digests(out)
    assert occupant(out) == "run"
    assert train(world, out, seed=3) == 2
    assert "already holds a finished run. Pass --overwrite true" in capsys.readouterr().err
    assert train(world, out, seed=3, resume_from_checkpoint="auto") == 2  # there is no checkpoint to go on from
    assert weight_digests(out) == before


def test_a_foreign_model_is_never_replaced(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llama().save_pretrained(tmp_path)
    before = weight_digests(tmp_path)
    for flags in ({}, {"overwrite": True}, {"resume_from_checkpoint": "auto"}):
        assert train(world, tmp_path, **flags) == 2
        assert "holds a model that no run of rosu wrote" in capsys.readouterr().err
    assert weight_digests(tmp_path) == before


def test_a_killed_run_leaves_a_folder_that_is_known_as_its_own(world: World, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("rosu_llm.recipes.run.write_record", lambda *_: 1 / 0)  # killed after the model was written
    with pytest.raises(ZeroDivisionError):
        from rosu_llm.recipes.run import run
        from rosu_llm.recipes.settings import build

        run(build(world.settings(tmp_path, max_steps=1, save_strategy="no")))
    assert weights(tmp_path) and json.loads((tmp_path / MANIFEST).read_text())["finished"] is False
    assert occupant(tmp_path) == "run"


def test_two_runs_at_once(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(tmp_path):
        assert train(world, tmp_path) == 2
        error = capsys.readouterr().err
        assert f"is in use by another run (process {os.getpid()} on " in error
        assert not weights(tmp_path)
    assert train(world, tmp_path) == 0


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    """Killed, it leaves its file, which locks nobody out."""
    code = (
        "import os, signal, sys; from pathlib import Path; from rosu_llm.recipes.folder import locked\n"
        f"with locked(Path({str(tmp_path)!r})):\n os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == -9
    assert (tmp_path / LOCK).is_file()
    with locked(tmp_path), pytest.raises(ConfigError, match="in use"), locked(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()


def test_a_model_beside_an_adapter_is_refused(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    for adapters in (True, False):
        with pytest.raises(ConfigError, match=r"holds an adapter .* and a whole model"):
            find_model(str(tmp_path), adapters=adapters)


def results(run: Path, recorded: dict[str, str]) -> Path:
    """An evaluation's files as ``rosu eval tofu`` leaves them, of the weights ``recorded``."""
    folder = run / "evals"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text('{"model_utility": 0.6}')
    (folder / SIDECAR).write_text(json.dumps({"weights": recorded, "conditions": {}}))
    return folder / FILES[1]


def test_results_of_the_model_before_are_not_shown_as_the_new_runs(world: World, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert train(world, out) == 0
    path = results(out, weight_digests(out))
    assert check_current(read_result(path)).figures and read_runs([out])[0].tofu is not None
    assert train(world, out, overwrite=True, seed=5, learning_rate=0.03) == 0
    with pytest.raises(DataError, match=r"no result of this model: other weights lie in .*model.safetensors changed"):
        check_current(read_result(path))
    (run,) = read_runs([out])
    assert run.tofu is None and any("no result of this model" in problem for problem in run.problems)


def test_results_without_a_record_or_without_weights_beside_them_are_taken(tmp_path: Path) -> None:
    """OpenUnlearning records nothing; results outside the model's folder stay those of the model they name."""
    assert of_other_weights(None, tmp_path) is None
    assert of_other_weights({"model.safetensors": "sha256:0"}, tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"1")
    assert "changed since" in (of_other_weights({"model.safetensors": "sha256:0"}, tmp_path) or "")


def test_wmdp_results_of_other_weights_are_left_out(world: World, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert train(world, out) == 0
    document = {"schema": "rosu-llm/wmdp/1", "model": {"name": "x", "identity": "y", "weights": weight_digests(out)}}
    (out / "wmdp_out.json").write_text(json.dumps(document))
    assert read_runs([out])[0].wmdp == out / "wmdp_out.json"
    document["model"]["weights"] = {"model.safetensors": "sha256:0"}  # type: ignore[index]
    (out / "wmdp_out.json").write_text(json.dumps(document))
    (run,) = read_runs([out])
    assert run.wmdp is None and any("wmdp_out.json is left out" in problem for problem in run.problems)
