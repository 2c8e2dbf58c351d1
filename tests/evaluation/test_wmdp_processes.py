"""Two processes share the questions and give, question by question, the result of one; errors end all of them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.evaluation.wmdp_records import copy_model, real_questions
from tests.preloaded import beside, interpreter

TIMEOUT = 240

pytestmark = pytest.mark.xdist_group("processes")


def start(arguments: list[str], cache: Path, world: int = 1) -> subprocess.CompletedProcess[str]:
    command = [interpreter()]
    if world > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    command += ["-m", "rosu_llm", "eval", "wmdp", *arguments, "--device", "cpu", "--dtype", "float32"]
    surroundings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ROSU_CACHE": str(cache),
    }
    if world > 1:
        surroundings["ACCELERATE_USE_CPU"] = "true"  # else processes under torchrun do not find each other on CPUs
    return subprocess.run(
        command, env=beside(surroundings), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


@pytest.fixture(scope="module")
def arguments(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("processes")
    data = real_questions(shared_data, folder / "data")
    model = copy_model(shared_data / "stories260K", folder / "unlearned", noise=0.5)
    return [str(model), "--base", str(shared_data / "stories260K"), "--data-dir", str(data)]


def read(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "wmdp_unlearned.json").read_text())
    return record


def test_two_processes_give_the_result_of_one(arguments: list[str], tmp_path: Path) -> None:
    alone = start([*arguments, "--out", str(tmp_path / "one")], tmp_path / "cache-one")
    assert alone.returncode == 0, alone.stderr[-3000:]
    shared = start([*arguments, "--out", str(tmp_path / "two")], tmp_path / "cache-two", world=2)
    assert shared.returncode == 0, shared.stderr[-3000:]
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    assert (one["settings"]["processes"], two["settings"]["processes"]) == (1, 2)
    assert one["leaves"] == two["leaves"]
    assert one["scores"] == two["scores"] and one["base"]["scores"] == two["base"]["scores"]
    assert one["delta_score"] == two["delta_score"]
    # 34 questions of 4 choices: each process answers about half of them (17 × 4, and up to 4 × 4 more to fill up)
    asked = [int(part.split("/")[1].split()[0]) for part in shared.stderr.split("requests:")[1:] if "/" in part]
    assert asked and max(asked) <= 84
    assert shared.stdout.count("| method |") == 1  # only the first process speaks


def test_a_launch_with_the_wrong_number_of_processes_is_noticed(arguments: list[str], tmp_path: Path) -> None:
    done = start([*arguments, "--expect-processes", "3", "--out", str(tmp_path)], tmp_path / "cache")
    assert done.returncode == 2
    assert "--num-processes 3 was asked for, but 1 started" in done.stderr


def test_num_processes_starts_as_many(arguments: list[str], tmp_path: Path) -> None:
    """Through ``accelerate launch``, as users do."""
    done = start([*arguments, "--num-processes", "2", "--limit", "2", "--out", str(tmp_path)], tmp_path / "cache")
    assert done.returncode == 0, done.stderr[-3000:]
    assert read(tmp_path)["settings"]["processes"] == 2
    assert "| unlearned (limit 2) |" in done.stdout
