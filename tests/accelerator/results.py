"""Build the simulated accelerator, run every case on it, and read what came of them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.accelerator.cases import LAYOUTS, plan
from tests.conftest import ROOT
from tests.distributed.processes import environment

#: Seconds for building, and for all cases; either takes about a minute on one core.
BUILD, RUN = 400, 500


class Results:
    """What the cases left in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended: dict[str, dict[str, Any]] = json.loads((folder / "ended.json").read_text())

    def found(self, name: str) -> dict[str, Any]:
        """What the first rank of a case wrote; fails with what it said if it has not."""
        path = self.folder / name / "found.json"
        assert path.is_file(), f"{name}: {self.said(name)[-3000:]}"
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    def said(self, name: str, rank: int = 0) -> str:
        """What a rank printed."""
        return (self.folder / name / f"rank{rank}.txt").read_text()

    def weights(self, name: str, *, start: bool = False) -> Tensor:
        """All weights after training, or before, as one float64 vector."""
        self.found(name)
        found = load_file(self.folder / name / "weights")
        return torch.cat(
            [found[key].double().reshape(-1) for key in sorted(found) if key.startswith("start.") is start]
        )

    def difference(self, name: str, truth: str) -> float:
        """‖w − w_truth‖/‖w_truth − w₀‖."""
        goal, start = self.weights(truth), self.weights(truth, start=True)
        return float((self.weights(name) - goal).norm() / (goal - start).norm())


def layouts() -> tuple[str, ...]:
    """Those that the installed packages can run."""
    deepspeed = importlib.util.find_spec("deepspeed") is not None
    return tuple(layout for layout in LAYOUTS if deepspeed or not layout.startswith("zero"))


def produce(folder: Path) -> Results:
    """Build, and run all cases in one go."""
    here = {**environment(), **{k: v for k, v in os.environ.items() if k == "TORCH_EXTENSIONS_DIR"}}
    del here["DS_ACCELERATOR"]  # DeepSpeed finds the device itself
    _call("tests.accelerator.device", [], here, BUILD)
    (folder / "plan.json").write_text(json.dumps(plan(layouts())))
    _call("tests.accelerator.launch", [str(folder), str(folder / "plan.json")], here, RUN)
    return Results(folder)


def _call(module: str, arguments: list[str], here: dict[str, str], patience: float) -> None:
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, env=here, cwd=ROOT, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(
            f"{module} took more than {patience} s. A build that was killed leaves a file 'lock' in its folder below "
            f"{here['TORCH_EXTENSIONS_DIR']}: remove that folder."
        ) from error
    assert done.returncode == 0, f"{module} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
