"""Several processes give the very file of one, also with uneven data and idle processes; a killed run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.errors import DataError
from rosu_llm.evaluation.processes import BatchJob, Finished, run_jobs
from tests.conftest import ROOT
from tests.evaluation.tofu_cases import evaluate, read, theirs
from tests.preloaded import beside, interpreter

pytestmark = pytest.mark.xdist_group("processes")

TIMEOUT = 240
FILES = ("TOFU_EVAL.json", "TOFU_SUMMARY.json")
#: 58 questions in data sets of 12, 10, 9, 8 and 7: with batches of 5 they go unevenly over two processes; with batches
#: of 64 most passes have a single batch, and three processes run short of them.
UNEVEN = {"batch_size": 5, "max_new_tokens": 24}
IDLE = {"batch_size": 64, "max_new_tokens": 12}


def launch(world: int, folder: Path, cases: dict[str, dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """Evaluate every case into ``folder/NAME``, all in one launch of ``world`` processes under torchrun."""
    command = [interpreter(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    command += [__file__, str(folder), json.dumps(cases)]
    surroundings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        command, env=beside(surroundings), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def work(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    """One of the processes. ``killed`` = rank: that one is killed as soon as it sees results and should go on."""
    import torch
    import torch.distributed as dist

    from tests.distributed.leaving import leave

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, settings in cases.items():
        if name == "broken":
            break_one(folder)
            continue
        mine = settings.pop("killed", None) == dist.get_rank()
        watch = Passes(kill_after=folder / name / FILES[0] if mine else None)
        evaluate("chat", "full", folder / name, retain=theirs("chat", "retain"), watch=watch, **settings)
    leave()


class Passes:
    """Counts the forward passes of a model."""

    def __init__(self, kill_after: Path | None = None) -> None:
        self.kill_after, self.count = kill_after, 0

    def __call__(self) -> None:
        self.count += 1
        if self.kill_after and self.kill_after.exists():
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


def test_three_processes_of_which_one_is_killed(alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three give the files of one; killed in the middle of a pass, the run is finished by one, nothing done twice."""
    done = launch(3, tmp_path, {"idle": IDLE, "uneven": {**UNEVEN, "killed": 1}})
    assert done.returncode != 0 and "Signal 9" in done.stderr, done.stderr[-4000:]
    assert alone.agrees(tmp_path, "idle")
    # the batch that the killed process had taken is nobody's, so at least its pass is missing, whatever the others did
    left, whole = read(tmp_path / "uneven" / FILES[0]), read(alone.folder / "uneven" / FILES[0])
    assert set(left) < set(whole) and all(left[name] == whole[name] for name in left)

    titles: list[str] = []

    def noted(jobs: Sequence[BatchJob], finished: Finished) -> None:
        titles.extend(job.title for job in jobs)
        run_jobs(jobs, finished)

    monkeypatch.setattr("rosu_llm.evaluation.tofu.passes.run_jobs", noted)
    passes = Passes()
    for _ in range(2):  # the second time everything is there
        evaluate("chat", "full", tmp_path / "uneven", retain=theirs("chat", "retain"), watch=passes, **UNEVEN)
        assert 0 < passes.count < alone.passes
        assert alone.agrees(tmp_path, "uneven")
    assert titles and len(set(titles)) == len(titles)
    measured_before = {"forget answers": "forget_Q_A_Prob", "retain probabilities": "retain_Q_A_Prob"}
    measured_before |= {name: name for name in whole if name.endswith(("_ROUGE", "_gibberish"))}
    assert not [title for title in titles if measured_before.get(title) in left]


def test_an_error_of_one_process_is_raised_on_all(tmp_path: Path) -> None:
    """Also on those that wait, and results that came before it were handed over."""
    done = launch(3, tmp_path, {"broken": {}})
    assert done.returncode == 0, done.stderr[-4000:]
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(3)] == ["sample 5 is bad"] * 3
    assert (tmp_path / "first.txt").read_text() == "[0, 1, 2]"
    assert (tmp_path / "large.txt").read_text() == "[9000000, 9000000, 9000000]"  # more than a store takes at once


def break_one(folder: Path) -> None:
    """Eight tasks of which the sixth fails, on whichever process gets it."""
    import torch.distributed as dist

    def work(batch: Sequence[int]) -> list[int]:
        time.sleep(0.2 if batch == [5] else 0)  # the others are then waiting
        if batch == [5]:
            raise DataError("sample 5 is bad")
        return list(batch)

    def finished(number: int, values: list[Any], _: float) -> None:
        assert dist.get_rank() == 0 and number == 0
        (folder / "first.txt").write_text(str(values))

    def measure(_: int, values: list[Any], __: float) -> None:
        (folder / "large.txt").write_text(str([len(value) for value in values]))

    run_jobs([BatchJob("large", [[0], [1], [2]], lambda batch: ["ü" * 9_000_000])], measure)
    jobs = [BatchJob("good", [[0, 1], [2]], work), BatchJob("bad", [[0], [1], [2], [3], [4], [5]], work)]
    try:
        run_jobs(jobs, finished)
    except DataError as error:
        (folder / f"{dist.get_rank()}.txt").write_text(str(error))


if __name__ == "__main__":
    work(Path(sys.argv[1]), json.loads(sys.argv[2]))
