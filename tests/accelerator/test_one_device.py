"""On one simulated device every trainer, method and loss gives the CPU's weights, and seldom makes the host wait."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rosu_llm.geometry import METHODS
from rosu_llm.losses.registry import LOSSES
from tests.accelerator.cases import NUMBERS, RANDOM, REPRESENTED, TRAINED
from tests.accelerator.results import Results

pytestmark = pytest.mark.xdist_group("processes")

#: What the host waits for in a step of ours: where the answers are, the losses at w, both Gram matrices, the loss at
#: w+δ together with what became of δ, and how far the optimizer went.
WAITS = 6
#: Where it waits more often.
MORE = {
    "metric of Adam": 10,  # the products in the metric, those of D⁻¹q, and the optimizer's count of steps
    "metric of Adam, rank 2": 19,
    "rank 3": 16,  # which samples there are, and where their answers are
    "gu": 18,
    "orthograd": 14,
    "ssd": 30,  # each sample's loss, and where its answers are
    "npo": 8,  # which samples a micro-batch has
    "kl": 8,  # likewise
    "undial": 8,
    "idk_dpo": 10,  # and which third answers
    "altpo": 10,
    "bounded, automatic radius": 10,  # that and the weights; ‖w‖
    "bounded by token": 12,
    "memory": 7,
    "refreshed memory": 18,  # a pass over all retain data
    "calibrated": 10,
    "captures in host memory": 69,  # two gradients and the backup, tensor by tensor
    "evaluated": 12,
    "representation": 7,
}
#: ⟨x, y⟩ of directions that are orthogonal by construction cancels, and is measured in float64.
MEASURED = "gu"


def test_every_method_and_every_loss_is_among_the_cases() -> None:
    settings = [*TRAINED.values(), *REPRESENTED.values()]
    named = {case[key] for case in settings for key in ("forget_loss", "retain_loss") if key in case}
    named |= {loss for rule in METHODS.values() for loss in rule.losses.values()}
    assert {case.get("method", "rosu") for case in settings} >= set(METHODS)
    # the first two where none is named; the last is of images, which have a trainer of their own
    assert named | {"nll", "representation", "classification"} >= set(LOSSES)


@pytest.mark.parametrize("name", [*TRAINED, *REPRESENTED])
def test_weights_are_the_cpus(name: str, results: Results) -> None:
    """After a few AdamW steps in float32."""
    assert results.found(f"npu/{name}")["devices"] == ["npu"]
    assert results.found(f"cpu/{name}")["devices"] == ["cpu"]
    # attention and sums in another order round differently; AdamW divides by √v̂, which magnifies that where it is tiny
    assert results.difference(f"npu/{name}", f"cpu/{name}") < 2e-4


@pytest.mark.parametrize("name", [*TRAINED, *REPRESENTED])
def test_the_host_seldom_waits(name: str, results: Results) -> None:
    """Counted in the third step or the last, with two micro-batches; what transformers waits for is not ours."""
    found = results.found(f"npu/{name}")
    own = [row for row in found["sites"]["sync"] if not row[2].startswith("[")]
    assert found["step"]["sync"]["own"] <= MORE.get(name, WAITS), own


@pytest.mark.parametrize("name", [name for name in (*TRAINED, *REPRESENTED) if name != MEASURED])
def test_no_gradient_is_converted_to_float64(name: str, results: Results) -> None:
    """Only a few sums for each tensor are; a copy of the model would be 155 kB."""
    found = results.found(f"npu/{name}")
    assert found["step"]["float64"]["own bytes"] < 22_000, found["sites"]["float64"]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_the_cpus(name: str, results: Results) -> None:
    """Diagnosis and evaluations, of models that are on the device."""
    mine, theirs = results.found(f"npu/{name}"), results.found(f"cpu/{name}")
    assert (mine["devices"], theirs["devices"]) == (["npu"], ["cpu"])
    compared = compare(mine["numbers"], theirs["numbers"])
    assert compared > 10


def compare(a: Any, b: Any, where: str = "") -> int:
    """Raise at the first number that differs by more than float32 rounding; how many were compared."""
    if isinstance(b, dict):
        assert a.keys() == b.keys()
        return sum(compare(a[key], b[key], f"{where}/{key}") for key in b)
    if isinstance(b, list):
        assert len(a) == len(b)
        return sum(compare(x, y, f"{where}/{i}") for i, (x, y) in enumerate(zip(a, b, strict=True)))
    if isinstance(b, float) and math.isfinite(b):
        # curvature is L(w+hu) − 2L(w) + L(w−hu) over h² = .0025, each L of two float32 shares of about 2 that are
        # rounded by up to 1.2e-7: 4·2·1.2e-7/.0025 = 4e-4
        assert a == pytest.approx(b, rel=2e-3, abs=4e-4 if "curvature" in where else 1e-5), where
        return 1
    return 0


@pytest.mark.parametrize("name", [name for name in RANDOM if "dropout" in name])
def test_the_perturbed_pass_sees_the_same_dropout(name: str, results: Results) -> None:
    """At ρ = 10⁻³ the losses differ by far less than two draws of masks do."""
    logs = [entry for entry in results.found(f"npu/{name}")["logs"] if "loss/surrogate" in entry]
    assert len(logs) == 3
    for entry in logs:
        assert entry["loss/surrogate"] == pytest.approx(entry["loss/retain"], abs=2e-6)


def test_bf16_autocast(results: Results) -> None:
    found = results.found("npu/bf16")
    logs = [entry for entry in found["logs"] if "perturb/realized" in entry]
    assert found["devices"] == ["npu"]
    assert all(0.5 < entry["perturb/realized"] < 1.5 and entry["perturb/distortion"] > 1e-3 for entry in logs)


@pytest.mark.parametrize("cosine", ["0.3", "0.99", "0.9999", "0.999999"])
def test_gradients_that_nearly_coincide(cosine: str, results: Results) -> None:
    """‖q‖ against float64. Float32 sums of float32 products would be 9 % off at 0.9999; what cancels is measured."""
    found = results.found("npu/hard")["numbers"][cosine]
    assert found["cosine"] > float(cosine) - 0.6
    assert found["norm"] == pytest.approx(1.0, rel=1e-5)
    assert found["float64"] < 0.01  # of a copy, for the Gram matrix itself
