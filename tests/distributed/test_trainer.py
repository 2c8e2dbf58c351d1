"""ROSUTrainer gives the same weights on one process, under DDP and under ZeRO; checkpoints and adapters too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.models import tiny_llama

WORKER = ROOT / "tests" / "distributed" / "trainer_worker.py"
TIMEOUT = 240

pytestmark = pytest.mark.xdist_group("processes")


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
    }


def start(layout: str, folder: Path, world: int, **settings: Any) -> subprocess.CompletedProcess[str]:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable]
    if layout != "local":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    command += [str(WORKER), layout, str(folder), json.dumps(settings)]
    return subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def train(layout: str, folder: Path, world: int = 2, **settings: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    done = start(layout, folder, world, **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (folder / "model").glob("*model.safetensors")
    weights = load_file(file)
    record = json.loads((folder / "logs.json").read_text())
    return torch.cat([weights[name].double().reshape(-1) for name in sorted(weights)]), record


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, dict[str, Any]]:
    return train("local", tmp_path_factory.mktemp("local"), world=1)


def movement(weights: torch.Tensor) -> float:
    names = dict(tiny_llama().named_parameters())
    start = torch.cat([names[n].detach().double().reshape(-1) for n in sorted(names)])
    return float((weights - start).norm())


def pin(layout: str) -> None:
    if layout.startswith("zero"):
        pytest.importorskip("deepspeed")


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3"])
def test_training_gives_the_weights_of_one_process(
    layout: str, tmp_path: Path, reference: tuple[torch.Tensor, dict[str, Any]]
) -> None:
    """Matched pull, AdamW, clipping on, the same global windows (2 ranks × 2 micro-batches against 4)."""
    pin(layout)
    weights, record = train(layout, tmp_path)
    assert record["layout"] == ("ddp" if layout == "ddp" else "zero")
    # float32 sums in another order; AdamW divides by √v̂, which magnifies that for tiny gradients
    assert float((weights - reference[0]).norm()) / movement(reference[0]) < 1e-4
    for mine, truth in zip(record["logs"], reference[1]["logs"], strict=True):
        for name in ("loss/forget", "loss/surrogate", "norm/q", "coupling/cosine", "step/amplification_ratio"):
            assert mine[name] == pytest.approx(truth[name], rel=1e-3, abs=1e-5), name


def test_replicas_stay_identical_to_the_bit(tmp_path: Path) -> None:
    """Twenty steps with calibration; the worker compares the replicas at the end and fails if they differ."""
    _, record = train("ddp", tmp_path, max_steps=20, calibrate="holdout")
    assert len(record["logs"]) == 20


@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3"])
def test_resuming_reproduces_the_uninterrupted_run(layout: str, tmp_path: Path) -> None:
    pin(layout)
    whole, _ = train(layout, tmp_path / "a", save_strategy="steps", save_steps=2, forget_loss="npo")
    checkpoint = str(tmp_path / "a" / "run" / "checkpoint-2")
    again, _ = train(layout, tmp_path / "b", resume=checkpoint, forget_loss="npo")
    assert torch.equal(whole, again)


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_lora_and_gradient_checkpointing(layout: str, tmp_path: Path) -> None:
    pin(layout)
    settings: dict[str, Any] = {"lora": True, "max_steps": 3}
    alone, _ = train("local", tmp_path / "local", world=1, **settings)
    spread, _ = train(
        layout,
        tmp_path / layout,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        **settings,
    )
    # adapters start at zero, so AdamW's first steps are sign-like: rounding shows more than in full weights
    assert float((alone - spread).norm() / alone.norm()) < 1e-3


def test_calibration_and_uneven_data_agree_on_every_collective(tmp_path: Path) -> None:
    """37 samples do not divide by 2 ranks × 2 × 2; an epoch's last window is shorter."""
    _, record = train("ddp", tmp_path, uneven=True, max_steps=7, calibrate="holdout")
    assert len(record["logs"]) == 7
    assert all(0.0 <= entry["calibrate/scale"] <= 1.0 for entry in record["logs"])


def test_a_dying_rank_ends_the_run(tmp_path: Path) -> None:
    started = time.monotonic()
    done = start("ddp", tmp_path, 2, die=True)
    assert done.returncode != 0
    assert time.monotonic() - started < 120


def test_offload_is_refused_at_construction() -> None:
    from rosu_llm.errors import UnsupportedLayoutError
    from rosu_llm.space.zero import refuse_offload

    refuse_offload({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}}})
    for key in ("offload_optimizer", "offload_param"):
        with pytest.raises(UnsupportedLayoutError, match=key):
            refuse_offload({"zero_optimization": {"stage": 3, key: {"device": "cpu"}}})
    with pytest.raises(UnsupportedLayoutError, match="hpZ"):
        refuse_offload({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}})
