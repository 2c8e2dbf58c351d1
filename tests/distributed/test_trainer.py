"""ROSUTrainer gives the same weights on one process, under DDP, FSDP2 and ZeRO; checkpoints and adapters too.

FSDP2 runs through accelerate's own preparation, on gloo, from the shipped configuration (see trainer_worker.py).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cases import DIVERGENCE, LAYOUTS, OTHER_LAYOUTS, OTHERS, REFRESHED, SSD
from tests.distributed.conftest import Runs
from tests.distributed.processes import Cases, Plan, Run, flat, start_faulty, train
from tests.models import tiny_llama
from tests.vision.small import SmallCNN

pytestmark = pytest.mark.xdist_group("processes")


def difference(run: Run, truth: Run) -> float:
    """‖w − w_ref‖/‖w_ref − w₀‖."""
    start = flat({name: p.detach() for name, p in tiny_llama().named_parameters()})
    return float((run.vector - truth.vector).norm() / (truth.vector - start).norm())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_gives_the_weights_of_one_process(layout: str, runs: Runs) -> None:
    """Matched pull, AdamW, clipping on, the same global windows (2 ranks × 2 micro-batches against 4)."""
    spread, truth = runs(layout)["plain"], runs("local")["plain"]
    assert spread.record["layout"] == ("zero" if layout.startswith("zero") else layout)
    assert spread.record["kinds"] == (["DTensor"] if layout == "fsdp2" else ["Tensor"])
    # float32 sums in another order; AdamW divides by √v̂, which magnifies that for tiny gradients
    assert difference(spread, truth) < 1e-4
    for mine, theirs in zip(spread.logs, truth.logs, strict=True):
        for name in ("loss/forget", "loss/surrogate", "norm/q", "coupling/cosine", "step/amplification_ratio"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_folder_loads_and_holds_the_weights_in_memory(layout: str, runs: Runs) -> None:
    from transformers import AutoModelForCausalLM

    run = runs(layout)["plain"]
    loaded = dict(AutoModelForCausalLM.from_pretrained(run.folder / "model").named_parameters())
    assert loaded.keys() == run.weights.keys()
    assert all(torch.equal(loaded[name], value) for name, value in run.weights.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_checkpointing_changes_nothing(layout: str, runs: Runs) -> None:
    # to rounding: layers that are run again see padding in their feed-forward blocks, which others leave out
    assert difference(runs(layout)["checkpointing"], runs(layout)["plain"]) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_with_gradient_checkpointing(layout: str, runs: Runs) -> None:
    spread, truth = runs(layout)["lora"], runs("local")["lora"]
    assert spread.weights.keys() == truth.weights.keys()
    # B starts at zero, so its norm is how far it has moved
    moved = {name: value for name, value in truth.weights.items() if "lora_B" in name}
    off = flat({name: spread.weights[name] - value for name, value in moved.items()}).norm()
    assert float(off / flat(moved).norm()) < 1e-4
    assert (spread.folder / "model" / "adapter_model.safetensors").is_file()


@pytest.fixture(scope="module")
def resumed(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Run]]:
    """New processes go on from the checkpoint in the middle; FSDP2 also from one that is not sharded."""
    plan: Plan = {}
    for layout in LAYOUTS:
        if layout.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
            continue
        names: Cases = {"saving": {"forget_loss": "npo"}, "refreshed": REFRESHED}
        if layout == "fsdp2":
            names["full"] = {"forget_loss": "npo", "state_dict": "FULL_STATE_DICT"}
        if "divergence" in runs(layout):
            names["divergence"] = DIVERGENCE
        if "ssd" in runs(layout):
            names["ssd"] = SSD
        plan[layout] = {
            name: {**settings, "resume": str(runs(layout)[name].folder / "run" / "checkpoint-2")}
            for name, settings in names.items()
        }
    return train(plan, tmp_path_factory.mktemp("resumed"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resuming_reproduces_the_uninterrupted_run(layout: str, runs: Runs, resumed: dict[str, dict[str, Run]]) -> None:
    """To the bit."""
    for name, before in runs(layout).items():
        if name in ("saving", "full", "refreshed", "divergence", "ssd"):
            again = resumed[layout][name]
            # two steps of the first run's history, the others its own
            assert len(again.logs) == len(before.logs) == (5 if name == "ssd" else 4)
            assert torch.equal(again.vector, before.vector)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calibration_between_backward_and_step_leaves_no_stale_weights(layout: str, runs: Runs) -> None:
    """Its forward gathers weights, has no backward that frees them, and the optimizer moves the shards next."""
    spread, truth = runs(layout)["calibrated"], runs("local")["calibrated"]
    assert all(0.0 < entry["calibrate/scale"] <= 1.0 for entry in truth.logs)
    assert difference(spread, truth) < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bounded_forgetting_with_an_automatic_radius(layout: str, runs: Runs) -> None:
    spread, truth = runs(layout)["bounded"], runs("local")["bounded"]
    assert any(0.0 < entry["depth/reached"] < 1.0 for entry in truth.logs)
    assert len({entry["depth/target"] for entry in truth.logs}) > 1  # measured anew
    assert difference(spread, truth) < 1e-4
    for mine, theirs in zip(spread.logs, truth.logs, strict=True):
        for name in ("depth/reached", "depth/target", "depth/loss", "depth/remaining", "perturb/norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
@pytest.mark.parametrize("case", ["reversed", "returned"])
def test_what_is_beyond_its_target_comes_back_alike(layout: str, case: str, runs: Runs) -> None:
    spread, truth = runs(layout)[case], runs("local")[case]
    assert any(entry["depth/remaining"] > 0.0 < entry["depth/beyond"] for entry in truth.logs)
    assert difference(spread, truth) < 1e-4
    for mine, theirs in zip(spread.logs, truth.logs, strict=True):
        for name in ("depth/remaining", "depth/beyond", "loss/retain"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3), name


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "zero3"])
@pytest.mark.parametrize("case", ["third", "distilled"])
def test_a_third_answer_and_distillation_are_spread_like_any_loss(layout: str, case: str, runs: Runs) -> None:
    """Reference values of both answers, and hidden states of both parts, are shared out and exchanged."""
    spread, truth = runs(layout)[case], runs("local")[case]
    assert difference(spread, truth) < 1e-4
    for mine, theirs in zip(spread.logs, truth.logs, strict=True):
        for name in ("loss/forget", "loss/retain", "norm/q"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


def test_images_give_the_weights_of_one_process(runs: Runs) -> None:
    """2 ranks × 2 micro-batches against 4, SGD with momentum and weight decay, BatchNorm by running statistics."""
    spread, truth = runs("ddp")["vision"], runs("local")["vision"]
    start = flat({name: p.detach() for name, p in SmallCNN().named_parameters()})
    # float32 sums in another order
    assert float((spread.vector - truth.vector).norm() / (truth.vector - start).norm()) < 1e-5
    assert [entry["loss/forget"] for entry in spread.logs] == pytest.approx(
        [e["loss/forget"] for e in truth.logs], rel=1e-4
    )


@pytest.mark.parametrize("layout", ["fsdp2", "zero3"])
def test_the_model_before_learning_is_whole_on_every_process(layout: str, runs: Runs) -> None:
    """ZeRO-3 splits what is loaded beside the trained model, and FSDP2 reads it on the first process alone."""
    spread, truth = runs(layout)["based"], runs("local")["based"]
    assert difference(spread, truth) < 1e-4
    for mine, theirs in zip(spread.logs, truth.logs, strict=True):
        assert mine["depth/target"] == pytest.approx(theirs["depth/target"], rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outside_the_budget_every_rank_goes_back_to_the_same_bits(layout: str, runs: Runs) -> None:
    run = runs(layout)["budget"]
    start = flat({name: p.detach() for name, p in tiny_llama().named_parameters()})
    assert [entry["budget/returns"] for entry in run.logs if "budget/returns" in entry] == [1.0, 2.0]
    assert torch.equal(run.vector, start)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_ends_with_the_closest_weights(layout: str, runs: Runs) -> None:
    spread, truth = runs(layout)["best"], runs("local")["best"]
    seen = [entry["depth/distance"] for entry in truth.logs]
    assert min(seen) < seen[-1]
    assert [entry["depth/distance"] for entry in spread.logs] == pytest.approx(seen, rel=1e-3)
    assert difference(spread, truth) < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_stores_the_gradients_of_one_process(layout: str, runs: Runs) -> None:
    assert difference(runs(layout)["stored"], runs("local")["stored"]) < 1e-4


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_other_methods_give_the_weights_of_one_process(layout: str, name: str, runs: Runs) -> None:
    spread, truth = runs(layout)[name], runs("local")[name]
    # A ratio F_f/F_r that lies within rounding of α would be chosen in one layout alone; none does here.
    assert difference(spread, truth) < 1e-4
    for key in ("ssd/selected", "ssd/kept") if name.startswith("ssd") else ():
        assert spread.logs[-1][key] == pytest.approx(truth.logs[-1][key], rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_takes_the_whole_retain_gradient_of_one_process(layout: str, runs: Runs) -> None:
    assert difference(runs(layout)["refreshed"], runs("local")["refreshed"]) < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_measures_the_same_divergence_from_the_initial_model(layout: str, runs: Runs) -> None:
    """From hidden states of all processes, and an output layer that is whole while it runs."""
    seen = [entry["budget/kl"] for entry in runs("local")["refreshed"].logs]
    assert min(seen) > 1e-3
    assert [entry["budget/kl"] for entry in runs(layout)["refreshed"].logs] == pytest.approx(seen, rel=1e-3)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "zero3"])
def test_divergence_from_the_initial_model_as_retain_loss(layout: str, runs: Runs) -> None:
    """Every process takes the initial distributions from hidden states that all of them computed."""
    spread, truth = runs(layout)["divergence"], runs("local")["divergence"]
    assert truth.logs[-1]["loss/retain"] > 1e-4
    assert difference(spread, truth) < 1e-4
    for mine, theirs in zip(spread.logs, truth.logs, strict=True):
        assert mine["loss/retain"] == pytest.approx(theirs["loss/retain"], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calibration_and_uneven_data_agree_on_every_collective(layout: str, runs: Runs) -> None:
    """37 samples do not divide by 2 ranks × 2 × 2; an epoch's last window is shorter."""
    logs = runs(layout)["uneven"].logs
    assert len(logs) == 7
    assert all(0.0 <= entry["calibrate/scale"] <= 1.0 for entry in logs)


def test_replicas_stay_identical_to_the_bit(runs: Runs) -> None:
    """Twenty steps with calibration; the worker compares the replicas at the end and fails if they differ."""
    assert len(runs("ddp")["twenty"].logs) == 20


def test_evaluating_sharded_weights_between_steps_changes_nothing(runs: Runs) -> None:
    evaluated = runs("fsdp2")["evaluated"]
    assert len(evaluated.record["evaluations"]) == 4
    assert torch.equal(evaluated.vector, runs("fsdp2")["plain"].vector)


def test_bf16_compute_over_sharded_float32_weights(runs: Runs) -> None:
    """The shipped configuration's mixed precision: the forward gathers bf16, the shards stay float32."""
    run = runs("fsdp2")["bf16"]
    assert {value.dtype for value in run.weights.values()} == {torch.float32}
    for entry in run.logs:
        assert 0.5 < entry["perturb/realized"] < 1.5
        assert 1e-3 < entry["perturb/distortion"] < 1.0  # 8 bits of mantissa


#: What the second of two processes does, and the layouts in which that is tried.
FAULTS = {"die": ("fsdp2", "zero3"), "fail": ("ddp", "fsdp2", "zero2", "zero3")}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], Path]:
    """How the processes of these runs ended, and where they wrote what they had to say."""
    folder = tmp_path_factory.mktemp("faults")
    here = importlib.util.find_spec("deepspeed") is not None
    launches: list[Cases] = [
        {f"{kind}/{layout}": {"layout": layout, "world": 2, kind: True, "max_steps": 2}}
        for kind, layouts in FAULTS.items()
        for layout in layouts
        if here or not layout.startswith("zero")
    ]
    return start_faulty(launches, folder), folder


@pytest.mark.parametrize("layout", FAULTS["die"])
def test_the_others_notice_a_dead_rank_themselves(layout: str, ended: tuple[dict[str, dict[str, Any]], Path]) -> None:
    """Without a launcher that would end them: an error within the time limit, not a hang."""
    if layout.startswith("zero"):
        pytest.importorskip("deepspeed")
    assert ended[0][f"die/{layout}"]["codes"] == [1, 3]


@pytest.mark.parametrize("layout", FAULTS["fail"])
def test_an_error_of_one_rank_inside_the_perturbed_pass_ends_the_others(
    layout: str, ended: tuple[dict[str, dict[str, Any]], Path]
) -> None:
    """Restoring the weights must not wait for processes that are somewhere else."""
    if layout.startswith("zero"):
        pytest.importorskip("deepspeed")
    assert ended[0][f"fail/{layout}"]["codes"] == [1, 1]
    said = (ended[1] / "fail" / layout / "rank1.txt").read_text()
    assert said.count("Traceback") == 1
    assert said.rstrip().endswith("RuntimeError: out of memory")


def test_unlike_devices_do_not_drift_apart(runs: Runs) -> None:
    """One process computes other scalars: the first one's count everywhere (the worker compares the replicas)."""
    assert torch.equal(runs("ddp")["unlike"].vector, runs("ddp")["plain"].vector)


def test_offload_is_refused_at_construction() -> None:
    from rosu_llm.errors import UnsupportedLayoutError
    from rosu_llm.space.zero import refuse_offload

    refuse_offload({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}}})
    for key in ("offload_optimizer", "offload_param"):
        with pytest.raises(UnsupportedLayoutError, match=key):
            refuse_offload({"zero_optimization": {"stage": 3, key: {"device": "cpu"}}})
    with pytest.raises(UnsupportedLayoutError, match="hpZ"):
        refuse_offload({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}})
