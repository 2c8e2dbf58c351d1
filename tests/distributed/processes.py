"""Start the worker of a distributed test: layouts and cases in one launch, for starting takes longer than training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.preloaded import beside, interpreter

WORKER = ROOT / "tests" / "distributed" / "trainer_worker.py"
TIMEOUT = 500

#: Name of a case → settings of its training run.
Cases = dict[str, dict[str, Any]]
#: Layout → its cases, in an order in which one process can run them.
Plan = dict[str, Cases]


def environment() -> dict[str, str]:
    surroundings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
    }
    return beside(surroundings)


def start(plan: Plan, folder: Path, world: int) -> subprocess.CompletedProcess[str]:
    """Run the layouts and their cases one after another under torchrun (one process: without)."""
    command = [interpreter()]
    if world > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    command += [str(WORKER), str(folder), json.dumps(plan)]
    return subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def start_faulty(launches: list[Cases], folder: Path) -> dict[str, dict[str, Any]]:
    """How the ranks of every case ended; nothing ends the others when one does."""
    command = [interpreter(), "-m", "tests.distributed.fault_worker", str(folder), json.dumps(launches)]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-6000:]
    ended: dict[str, dict[str, Any]] = json.loads((folder / "ended.json").read_text())
    return ended


class Run:
    """What one case left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: dict[str, Any] = json.loads((folder / "logs.json").read_text())
        self.logs: list[dict[str, float]] = self.record["logs"]
        self.weights = load_file(folder / "weights.safetensors")

    @property
    def vector(self) -> torch.Tensor:
        """All trained weights, as they were in memory after training."""
        return flat(self.weights)


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """One long float64 vector, in the order of names."""
    return torch.cat([weights[name].double().reshape(-1) for name in sorted(weights)])


def train(plan: Plan, folder: Path, world: int = 2) -> dict[str, dict[str, Run]]:
    """Run the cases of every layout; fails with the workers' errors if they do."""
    done = start(plan, folder, world)
    assert done.returncode == 0, done.stderr[-6000:]
    return {layout: {name: Run(folder / layout / name) for name in cases} for layout, cases in plan.items()}
