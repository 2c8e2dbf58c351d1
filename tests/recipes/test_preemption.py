"""A scheduler's signal: a checkpoint at the end of the step, a non-zero exit with one line, and an exact resumption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rosu_llm import register_loss
from rosu_llm.cli.main import main
from rosu_llm.errors import RosuError
from rosu_llm.losses import LOSSES
from rosu_llm.losses.language import nll
from rosu_llm.recipes.folder import MANIFEST
from rosu_llm.training.checkpoints import resolve_resume
from tests.conftest import ROOT
from tests.training.tiny_world import World

LOSS = "nll_with_a_signal"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


class Sender:
    """Sends a signal to this process in the pass with number ``at``, which is in the middle of a step."""

    def __init__(self) -> None:
        self.at = self.passes = self.number = 0

    def arm(self, number: int, at: int) -> None:
        self.number, self.at, self.passes = number, at, 0

    def __call__(self, model: nn.Module, batch: Any, context: Any) -> Tensor:
        self.passes += 1
        if self.passes == self.at:
            os.kill(os.getpid(), self.number)
        return nll(model, batch, context)


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender()
    register_loss(LOSS)(made)
    yield made
    del LOSSES[LOSS]


def flags(world: World, out: Path, **changes: Any) -> list[str]:
    settings = {
        "method": "rosu",
        "forget_data": f"{world.data}:forget10",
        "retain_loss": LOSS,
        "lora_r": 2,
        "lora_dropout": 0.3,
        "max_steps": 5,
        "save_strategy": "no",
        "gradient_accumulation_steps": 2,
        "resume_from_checkpoint": "auto",
    }
    return world.flags(out, **{**settings, **changes})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
@pytest.mark.parametrize("jit", [False, True], ids=["", "jit"])
def test_a_signal_stops_at_the_step_and_one_command_goes_on(
    number: signal.Signals, jit: bool, world: World, sender: Sender, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    again = flags(world, out, **({"enable_jit_checkpoint": True, "save_only_model": True} if jit else {}))
    assert main(["train", *flags(world, whole)]) == 0
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    sender.arm(number, at=4 * 2 + 2)  # four passes over the retain data in a step of two micro-batches
    capsys.readouterr()
    assert main(["train", *again]) == 128 + number
    error = capsys.readouterr().err
    assert f"rosu train: stopped by {number.name} after step 3 of 5; go on from {out / 'checkpoint-3'}" in error
    assert "finished" not in error and not (out / "adapter_model.safetensors").exists()
    assert not (out / "rosu_run.json").exists() and (out / MANIFEST).is_file()
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    sender.arm(number, at=0)
    assert main(["train", *again]) == 0
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in (whole, out))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_signal_in_the_last_step_changes_nothing(world: World, sender: Sender, tmp_path: Path) -> None:
    sender.arm(signal.SIGTERM, at=1)
    assert main(["train", *flags(world, tmp_path, max_steps=1)]) == 0
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_a_signal_after_an_error_is_not_swallowed(world: World, sender: Sender, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["train", *flags(world, tmp_path, learning_rate=1e30, max_steps=4)]) == 2  # ends in NaN
    assert signal.getsignal(signal.SIGTERM) is before


def test_auto_begins_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert resolve_resume("auto", str(tmp_path)) is None
    assert resolve_resume("auto", str(tmp_path / "nowhere")) is None
    with pytest.raises(RosuError, match="write auto to begin where there is none"):
        resolve_resume(True, str(tmp_path))


@pytest.mark.xdist_group("processes")
def test_the_script_that_kills_runs_kills_one() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "kills.py"), "--kills", "1", "--smoke"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "1 of 1 equal bit for bit" in done.stdout, done.stdout + done.stderr
