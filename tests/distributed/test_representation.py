"""Representation-level training under DDP gives the weights of one process over the same windows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.distributed.processes import environment
from tests.models import tiny_decoder
from tests.preloaded import interpreter
from tests.representation.running import parameter_names, relative

WORKER = ROOT / "tests" / "distributed" / "representation_worker.py"
TIMEOUT = 240

pytestmark = pytest.mark.xdist_group("processes")

CASES: dict[str, dict[str, Any]] = {
    "fast": {"save_strategy": "steps", "save_steps": 2},
    "rmu": {"method": "graddiff", "forget_loss": "rmu", "reduction": "rmu", "learning_rate": 0.05, "batch": 1},
    "paper": {"reduction": "paper", "noise_shape": "token", "learning_rate": 0.02},
    "plain": {"path": "plain", "max_steps": 2},
}


def launch(folder: Path, cases: dict[str, dict[str, Any]], world: int) -> None:
    if not (folder / "original").exists():
        tiny_decoder().save_pretrained(folder / "original")
    command = [interpreter()]
    if world > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    done = subprocess.run(
        [*command, str(WORKER), str(folder), json.dumps(cases)],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    launch(folder, CASES, 1)
    return folder


def read(folder: Path, case: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    saved = load_file(folder / case / "theta.safetensors")
    record: dict[str, Any] = json.loads((folder / case / "logs.json").read_text())
    return saved["theta"], saved["start"], record


@pytest.mark.parametrize("world", [2, 3])
def test_ddp_gives_the_weights_of_one_process(world: int, alone: Path, tmp_path: Path) -> None:
    """Ragged documents, two corpora in turn, SGD; the worker fails where replicas differ in a single bit."""
    again = {"resume": str(tmp_path / "fast" / "run" / "checkpoint-2")}
    launch(tmp_path, {**CASES, "resumed": again}, world)
    for case in CASES:
        mine, start, record = read(tmp_path, case)
        truth, _, single = read(alone, case)
        assert record["layout"] == "ddp" and record["world"] == world and single["layout"] == "local"
        # sums in another order, and r is a difference of activations: rounding, relative to the distance gone
        assert relative(mine, truth) < 1e-6, case
        assert relative(mine - start, truth - start) < 1e-5, case
        assert relative(truth, start) > 1e-3, case
        assert record["corpora"] == single["corpora"] == [[step % 2] for step in range(len(single["corpora"]))]
        for one, other in zip(record["logs"], single["logs"], strict=True):
            for name in ("loss/forget", "loss/retain", "norm/forget"):
                assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-12), (case, name)
        assert record["logs"][0]["loss/retain"] == 0.0
    saved = load_file(tmp_path / "fast" / "model" / "model.safetensors")
    written = torch.cat([saved[name].double().reshape(-1) for name in parameter_names()])
    assert torch.equal(written, read(tmp_path, "fast")[0])
    assert torch.equal(read(tmp_path, "resumed")[0], read(tmp_path, "fast")[0])
