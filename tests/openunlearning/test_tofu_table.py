"""References → training → evaluation → table: one command, and the documented commands one by one, in the stand-in."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rosu_llm.errors import ConfigError
from rosu_llm.openunlearning import tofu
from rosu_llm.openunlearning.__main__ import main
from rosu_llm.openunlearning.baselines import TABLE, tofu_method
from rosu_llm.openunlearning.tofu import CPU_EVAL
from tests.conftest import ROOT
from tests.openunlearning.documented import documented, run_documented
from tests.openunlearning.standin_run import CHECKOUT, composed
from tests.preloaded import interpreter

MODEL = "Llama-3.2-1B-Instruct"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the stand-in that one may write into, with both reference models under their names on the hub."""
    folder = tmp_path / "open-unlearning"
    shutil.copytree(CHECKOUT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    size = {k: v for k, v in composed("model=tiny").model.items() if k != "model_args"}
    for seed, name in enumerate(("full", "retain90")):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**size))
        model.save_pretrained(folder / "open-unlearning" / f"tofu_{MODEL}_{name}")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


def rows(text: str) -> list[str]:
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]


@pytest.mark.xdist_group("processes")
def test_one_command_ends_in_a_table_and_continues_where_it_stopped(
    clone: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    call = ["tofu", "--cpu", "--methods", "Plain", "ROSU_recommended", "--rhos", "0.4", "--lrs", "1e-3"]
    assert main(call) == 0
    printed = capfd.readouterr().out
    references = ["method", "*Initial*", "*Retain*"]
    bounded = "(bounded by held-out data)"
    every = [*references, "Plain_lr1e-3", f"ROSU_recommended_rho0.4_lr1e-3 {bounded}"]
    assert rows(printed) == [*every, *references, "Plain", f"ROSU {bounded}"]
    assert "–" not in printed.split("TOFU forget10")[0]  # every score is there
    assert "Priv counts questions as unseen" not in printed
    run = clone / "saves" / "unlearn" / f"tofu_{MODEL}_forget10_ROSU_recommended_rho0.4_lr1e-3"
    found = json.loads((run / "evals" / "TOFU_EVAL.json").read_text())
    attacks = ("mia_loss", "mia_zlib", "mia_min_k", "mia_min_k_plus_plus")
    assert {len(found[attack]["holdout"]["value_by_index"]) for attack in attacks} == {4}  # 24 less 20

    (run / "evals" / ".evaluated").unlink()
    (run / "evals" / "TOFU_EVAL.json").write_text('{"half')  # cut off while being written
    before = (run / "model.safetensors").stat().st_mtime_ns
    assert main(call) == 0
    again = capfd.readouterr().out
    assert "[1/2] Plain lr1e-3: finished before" in again and "[2/2] ROSU recommended rho0.4 lr1e-3: done in" in again
    assert again.split("\n\n", 1)[1] == printed.split("\n\n", 1)[1]
    assert (run / "model.safetensors").stat().st_mtime_ns == before
    assert main([*call, "--train", "trainer.args.weight_decay=0.1"]) == 2
    assert "was made by another command (differing: trainer.args.weight_decay=0.1)" in capfd.readouterr().err


@pytest.mark.xdist_group("processes")
def test_the_documented_commands_end_in_a_table(clone: Path, tmp_path: Path) -> None:
    """Verbatim, from a shell."""
    commands = documented("openunlearning.md", "From training to the paper's table")
    assert "…" not in commands and "\npython src/train.py" in commands and "\nrosu table" in commands
    done = run_documented(commands, clone, tmp_path / "bin", interpreter(), train=[], evaluate=CPU_EVAL)
    assert done.returncode == 0, done.stderr[-2000:]
    assert rows(done.stdout) == ["method", "*Initial*", "*Retain*", "ROSU"]
    assert "–" not in done.stdout.split("TOFU forget10")[0]


def dry_run(clone: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    assert main(["tofu", "--dry-run", *words]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def test_the_commands_of_the_papers_table_are_those_of_its_page(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--dry-run`` prints what the page shows for each baseline, in the paper's order."""
    page = (ROOT / "docs" / "openunlearning_table3.md").read_text(encoding="utf-8").replace("\\\n", " ")
    shown = [shlex.split(line) for line in page.splitlines() if line.startswith("python src/train.py")]
    names = list(TABLE)
    commands = dry_run(clone, capsys, "--methods", *names, "--rhos", "0.4", "--lrs", "1e-5")
    made = [words for words in commands if words[1] == "src/train.py"]
    assert len(shown) == len(made) == len(names)
    for name, written, run in zip(names, shown, made, strict=True):
        task = f"task_name=tofu_{MODEL}_forget10_{name}_" + ("rho0.4_lr1e-5" if TABLE[name].has_radius else "lr1e-5")
        assert task in run
        left_out = {
            f"model.model_args.pretrained_model_name_or_path=open-unlearning/tofu_{MODEL}_full",
            *("forget_split=forget10", "retain_split=retain90", "holdout_split=holdout10"),
            *(f"trainer.args.{word}" for word in ("eval_strategy=no", "eval_on_start=false", "do_eval=false")),
            *("trainer.args.learning_rate=1e-5", "trainer.method_args.rho=0.4", task, f"task_name={name}"),
        }
        assert {*run} - left_out - {f"model={MODEL}"} == {*written} - left_out - {f"model={MODEL}"}, name
        assert f"task_name={name}" in written


def test_what_a_method_needs_is_said_before_any_work(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tofu", "--methods", "ROSU", "IdkDPO"]) == 2
    assert "IdkDPO needs data/idk.jsonl, which is not there: python setup_data.py --idk" in capsys.readouterr().err
    assert main(["tofu", "--methods", "AltPO", "--forget-split", "forget05"]) == 2
    assert "generate.py dataset_config.dataset_kwargs.name=forget05" in capsys.readouterr().err
    assert main(["tofu", "--methods", "ROSUU"]) == 2
    assert "Did you mean 'ROSU'?" in capsys.readouterr().err
    assert main(["tofu", "--forget-split", "forget50"]) == 2
    assert "Unknown forget split 'forget50'" in capsys.readouterr().err
    assert main(["tofu", "--smoke", "--data", "nowhere"]) == 2
    assert "nowhere lacks forget10.json" in capsys.readouterr().err
    assert not (clone / "saves").exists()


def test_any_trainer_can_be_named(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the checkout and ours; only those with a radius are run at several."""
    with pytest.raises(ConfigError, match="Unknown method 'finetune'"):
        tofu_method("finetune", clone)
    commands = dry_run(clone, capsys, "--methods", "Plain", "PCGrad", "MinMax", "--rhos", "0.1", "0.2", "--lrs", "1e-5")
    names = [word.rpartition("forget10_")[2] for words in commands for word in words if word.startswith("task_name=")]
    runs = ["Plain_lr1e-5", "PCGrad_lr1e-5", "MinMax_rho0.1_lr1e-5", "MinMax_rho0.2_lr1e-5"]
    assert names == [name for name in runs for _ in range(2)]


def test_the_record_names_devices_of_whatever_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tofu, "accelerator_kind", lambda: "xpu")
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda at: f"Max {at}")
    assert tofu._devices() == ["Max 0", "Max 1"]
    monkeypatch.setattr(tofu, "accelerator_kind", lambda: None)
    assert tofu._devices() == ["CPU"]
