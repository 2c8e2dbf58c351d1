"""Several processes give the very file of one, also with uneven data and idle processes; a killed run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.evaluation.tofu_cases import evaluate, read, theirs

pytestmark = pytest.mark.xdist_group("processes")

TIMEOUT = 240
FILES = ("TOFU_EVAL.json", "TOFU_SUMMARY.json")
#: 58 questions in data sets of 12, 10, 9, 8 and 7: with batches of 5 they go unevenly over two processes; with batches
#: of 64 most passes have a single batch, and all processes but the first have nothing to do in them.
UNEVEN = {"batch_size": 5, "max_new_tokens": 24}
IDLE = {"batch_size": 64, "max_new_tokens": 12}


def launch(world: int, folder: Path, cases: dict[str, dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """Evaluate every case into ``folder/NAME``, all in one launch of ``world`` processes under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    command += [__file__, str(folder), json.dumps(cases)]
    surroundings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        command, env=surroundings, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def work(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    """One of the processes. ``killed`` = [rank, n]: that rank is killed before its n-th forward pass of the case."""
    import torch
    import torch.distributed as dist

    from tests.distributed.leaving import leave

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, settings in cases.items():
        rank, number = settings.pop("killed", (None, 0))
        watch = Passes(kill_before=number if rank == dist.get_rank() else 0)
        evaluate("chat", "full", folder / name, retain=theirs("chat", "retain"), watch=watch, **settings)
    leave()


class Passes:
    """Counts the forward passes of a model."""

    def __init__(self, kill_before: int = 0) -> None:
        self.kill_before, self.count = kill_before, 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.kill_before:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Alone:
    """What one process gives, without torch.distributed."""

    folder: Path
    passes: int

    def agrees(self, other: Path, name: str) -> bool:
        return all((other / name / file).read_bytes() == (self.folder / name / file).read_bytes() for file in FILES)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("alone")
    passes = Passes()
    evaluate("chat", "full", folder / "uneven", retain=theirs("chat", "retain"), watch=passes, **UNEVEN)
    evaluate("chat", "full", folder / "idle", retain=theirs("chat", "retain"), **IDLE)
    return Alone(folder, passes.count)


def test_two_processes_give_the_files_of_one(alone: Alone, tmp_path: Path) -> None:
    done = launch(2, tmp_path, {"uneven": UNEVEN, "idle": IDLE})
    assert done.returncode == 0, done.stderr[-4000:]
    assert alone.agrees(tmp_path, "uneven") and alone.agrees(tmp_path, "idle")


def test_three_processes_of_which_one_is_killed(alone: Alone, tmp_path: Path) -> None:
    """Three give the files of one; killed in the middle of a pass, the run is finished by one, nothing done twice."""
    # In batches of 5 questions forget answers take 3, holdout 2, paraphrased and perturbed answers 3: the third batch
    # of the second process is one of the last kind.
    done = launch(3, tmp_path, {"idle": IDLE, "uneven": {**UNEVEN, "killed": [1, 3]}})
    assert done.returncode != 0 and "Signal 9" in done.stderr, done.stderr[-4000:]
    assert alone.agrees(tmp_path, "idle")
    left = read(tmp_path / "uneven" / FILES[0])
    assert "forget_Q_A_Prob" in left and "forget_Q_A_PARA_Prob" not in left

    passes = Passes()
    for _ in range(2):  # the second time everything is there
        evaluate("chat", "full", tmp_path / "uneven", retain=theirs("chat", "retain"), watch=passes, **UNEVEN)
        assert passes.count == alone.passes - (3 + 2)
        assert alone.agrees(tmp_path, "uneven")


if __name__ == "__main__":
    work(Path(sys.argv[1]), json.loads(sys.argv[2]))
