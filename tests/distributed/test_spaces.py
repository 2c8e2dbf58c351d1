"""Sharded spaces against one process, with controls that must fail; the choice of space from accelerate's state."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from rosu_llm.errors import ConfigError, UnsupportedLayoutError
from rosu_llm.space import LocalSpace
from rosu_llm.space.select import layout_name, select_space
from rosu_llm.training.layout import check_layout, layout_of
from tests.conftest import ROOT
from tests.distributed.processes import environment
from tests.preloaded import interpreter

pytestmark = pytest.mark.xdist_group("processes")


LAYOUTS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A slice of scripts/equivalence.py: three processes, so that no parameter divides evenly."""
    out = tmp_path_factory.mktemp("equivalence") / "rows.json"
    here = [x for x in LAYOUTS if not x.startswith("zero") or importlib.util.find_spec("deepspeed")]
    command = [interpreter(), str(ROOT / "scripts" / "equivalence.py"), "--json", str(out), "--controls"]
    command += ["--worlds", "3", "--steps", "3", "--amplify", "matched", "--optimizers", "adamw", "--layouts", *here]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_spread_weights_equal_those_of_one_process_and_controls_do_not(layout: str, rows: list[dict[str, Any]]) -> None:
    if layout.startswith("zero"):
        pytest.importorskip("deepspeed")
    mine = [row for row in rows if row["layout"] == layout]
    honest = [row for row in mine if row["sabotage"] is None]
    assert {row["accumulation"] for row in honest} == {1, 4}
    for row in honest:
        assert row["difference"] <= 1e-4
        assert row["replicas_equal"]
        # two gradients and the backup: whole under DDP, else a third of each (uneven slices: a little more on rank 0)
        assert row["copies_per_rank"] == pytest.approx(3.0 if layout == "ddp" else 1.0, abs=0.1)
        assert row["scalar_bytes_per_step"] < 400
        # ZeRO-1/2 gathers the weights again to perturb, to restore and after the pull; the others gather in the forward
        expected = pytest.approx(3.0, abs=0.1) if layout in ("zero1", "zero2") else 0.0
        assert row["gathered_copies_per_step"] == expected
    # Local dot products of whole gradients are right: under DDP the error is a δ of gradients that were not averaged.
    broken = [row for row in mine if row["sabotage"]]
    scalars = "local_delta" if layout == "ddp" else "local_dots"
    assert {row["sabotage"] for row in broken} == {"no_restore", scalars}
    assert all(row["difference"] > 1e-2 for row in broken)


@pytest.mark.parametrize("stage", [2, 3])
def test_bf16_zero_with_a_float32_master_reports_what_arrives(stage: int) -> None:
    pytest.importorskip("deepspeed")
    worker = ROOT / "tests" / "distributed" / "zero_bf16_worker.py"
    command = [interpreter(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(worker)]
    done = subprocess.run(
        [*command, str(stage), "1.0"], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOGS ")]
    logs = json.loads(line[5:])
    assert 0.5 < logs["perturb/realized"] < 1.5
    assert 1e-3 < logs["perturb/distortion"] < 1.0  # 8 bits of mantissa
    assert logs["step/amplification_ratio"] == pytest.approx(0.5)


def test_accumulating_whole_gradients_under_fsdp2_costs_a_copy_and_is_not_the_default() -> None:
    """Between micro-batches: 1/world of the gradients when each is reduced, all of them when only the last is."""
    worker = ROOT / "tests" / "distributed" / "fsdp_worker.py"
    command = [interpreter(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(worker)]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("HELD ")]
    held = json.loads(line[5:])
    assert held["sharded"] == pytest.approx(0.5, abs=0.02)
    assert held["unsharded"] == pytest.approx(1.0, abs=0.02)


def accelerator(kind: str, **extra: Any) -> Any:
    defaults = {"num_processes": 2, "mixed_precision": "no", "scaler": None, "is_fsdp2": False}
    return SimpleNamespace(distributed_type=SimpleNamespace(name=kind), **{**defaults, **extra})


@pytest.mark.parametrize(
    ("kind", "extra", "layout"),
    [
        ("NO", {"num_processes": 1}, "local"),
        ("MULTI_GPU", {}, "ddp"),
        ("MULTI_CPU", {}, "ddp"),
        ("FSDP", {"is_fsdp2": True}, "fsdp2"),
        ("DEEPSPEED", {}, "zero"),
    ],
)
def test_the_layout_is_read_from_accelerates_state(kind: str, extra: dict[str, Any], layout: str) -> None:
    assert layout_of(accelerator(kind, **extra)) == layout


@pytest.mark.parametrize(("kind", "words"), [("FSDP", "fsdp_version: 2"), ("MEGATRON_LM", "MEGATRON_LM"), ("TP", "TP")])
def test_other_layouts_are_refused(kind: str, words: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=words):
        layout_of(accelerator(kind))


def test_whole_parameters_get_the_local_space() -> None:
    model = nn.Linear(3, 2)
    assert layout_name(model) == "local"
    assert isinstance(select_space(model), LocalSpace)


def test_data_parallel_and_device_maps_are_refused() -> None:
    one = accelerator("NO", num_processes=1)
    with pytest.raises(UnsupportedLayoutError, match="DataParallel"):
        check_layout(one, nn.Linear(2, 2), n_gpu=4)
    spread = nn.Linear(2, 2)
    spread.hf_device_map = {"a": 0, "b": 1}  # type: ignore[assignment]
    with pytest.raises(UnsupportedLayoutError, match="device_map"):
        check_layout(one, spread, n_gpu=1)


def test_zero_configurations_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    def under(stage: int, **zero: Any) -> Any:
        plugin = SimpleNamespace(zero_stage=stage, deepspeed_config={"zero_optimization": {"stage": stage, **zero}})
        return accelerator("DEEPSPEED", state=SimpleNamespace(deepspeed_plugin=plugin))

    model = nn.Linear(2, 2)
    assert check_layout(under(2), model, n_gpu=1) == "zero"
    with pytest.raises(UnsupportedLayoutError, match="stage 0"):
        check_layout(under(0), model, n_gpu=1)
    with pytest.raises(UnsupportedLayoutError, match="offload_param"):
        check_layout(under(3, offload_param={"device": "cpu"}), model, n_gpu=1)
    check_layout(under(3), model, n_gpu=1)
    assert "zero3_save_16bit_model" in caplog.text


CONFIGS = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_accelerate_itself_reads_every_shipped_configuration(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    expected = {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}.get(path.stem, "DEEPSPEED")
    assert getattr(config.distributed_type, "name", config.distributed_type) == expected
    assert config.num_processes == 8
    if expected == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == int(path.stem[-1])


def test_the_launcher_builds_accelerates_command() -> None:
    from rosu_llm.cli.common import LAYOUTS, command

    assert {path.stem for path in CONFIGS} == set(LAYOUTS)
    argv = ["--config", "x.yaml", "--accelerate-config", "zero3", "--num-processes=4", "--rho", "0.2"]
    call = command("zero3", 4, argv)
    assert call[call.index("--config_file") + 1].endswith("zero3.yaml")
    assert call[call.index("--num_processes") + 1] == "4"
    assert call[-6:] == ["rosu_llm", "train", "--config", "x.yaml", "--rho", "0.2"]
    with pytest.raises(ConfigError, match="zero2"):
        command("zero", 2, [])
    with pytest.raises(ConfigError, match="--accelerate-config"):
        command(None, 2, [])
    with pytest.raises(ConfigError, match="at least 1"):
        command("ddp", 0, [])


def test_the_launcher_really_launches(tmp_path: Path) -> None:
    """Two processes on gloo through ``rosu train --accelerate-config FILE``, at smoke size."""
    config = tmp_path / "cpu.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 1\nmachine_rank: 0\n"
        "num_processes: 2\nmain_training_function: main\nrdzv_backend: static\nsame_network: true\nuse_cpu: false\n"
    )
    command = [interpreter(), "-m", "rosu_llm", "train", "--accelerate-config", str(config), "--num-processes", "2"]
    command += ["--smoke", "--ddp-backend", "gloo", "--output-dir", str(tmp_path / "out")]
    done = subprocess.run(
        command,
        env={**environment(), "ACCELERATE_USE_CPU": "true"},
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out" / "smoke" / "model.safetensors").is_file()
    assert "2 processes" in done.stderr
