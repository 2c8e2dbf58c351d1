"""The estimate before the first step is what a step then really allocates and runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor

from rosu_llm.geometry import build_rule
from rosu_llm.losses import LossContext, get_loss
from rosu_llm.step import UnlearningStep
from rosu_llm.training.preflight import Preflight, capture_options, preflight
from tests.losses import naive
from tests.models import CleanLM, samples, tiny_llama

METHODS = ("rosu", "minmax", "uam", "graddiff", "ft", "ng")
BATCH, OTHER = naive.padded(samples(3, seed=1), 14), naive.padded(samples(3, seed=2), 14)
EMBEDDINGS = 61 * 12
WEIGHTS = 2 * EMBEDDINGS + (24 * 24 + 24) + (24 * 12 + 12)


def size(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_passes_and_buffers_are_those_of_a_real_step(method: str, dtype: torch.dtype) -> None:
    """Count the backward passes and weigh what the parameter space holds afterwards."""
    model = CleanLM().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    estimate = preflight(model, build_rule(method), optimizer)
    passes = 0

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return get_loss("nll", "retain").function(model, batch, LossContext()) / 100

    step = UnlearningStep(model, optimizer, method=method, rho=0.1)
    step(lambda: loss(BATCH), lambda: loss(OTHER))
    assert estimate.passes == passes
    held = [*step.space._captured.values(), step.space._backup or []]
    assert estimate.buffers == sum(size(group) for group in held)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("captured", ["float32", "bfloat16"])
def test_a_step_of_a_llama_holds_what_was_estimated(frozen: bool, captured: str) -> None:
    """Captured gradients, backup and Adam's moments to the byte; with frozen bf16 layers, too."""
    model = tiny_llama(tie_word_embeddings=True)
    if frozen:
        model.model.layers[0].bfloat16().requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    settings = SimpleNamespace(capture_dtype=captured)
    estimate = preflight(model, build_rule("rosu"), optimizer, **capture_options(settings))

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=frozen):
            return get_loss("nll", "retain").function(model, batch, LossContext()) / 100

    step = UnlearningStep(model, optimizer, rho=0.1, capture_dtype=captured)
    step(lambda: loss(BATCH), lambda: loss(OTHER))
    state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim() > 0]
    assert step.space.held_bytes() == estimate.buffers
    assert size(state) == estimate.optimizer
    assert size(model.parameters()) == estimate.weights


def test_captured_gradients_may_be_narrower_and_elsewhere() -> None:
    """The backup keeps the weights' own width; what is in host memory takes none of the device's."""
    model, rule = CleanLM(), build_rule("rosu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = SimpleNamespace(capture_dtype="bfloat16", capture_device="model")
    assert preflight(model, rule, optimizer, **capture_options(settings)).buffers == (2 + 2 + 4) * WEIGHTS
    settings.capture_device = "cpu"
    found = preflight(model, rule, optimizer, **capture_options(settings))
    assert (found.buffers, found.host) == (0, (2 + 2 + 4) * WEIGHTS)
    assert "in host memory" in found.line() and found.peak == 8 * WEIGHTS
    averaging = build_rule("rosu", protect="both")  # whose memory stays as wide as the weights
    assert preflight(model, averaging, optimizer, **capture_options(settings)).host == (2 + 2 + 4 + 4) * WEIGHTS
    settings.amplify = "optimizer"  # nobody measures the optimizer's step: DeepSpeed's master is backup enough
    found = preflight(model, rule, optimizer, **capture_options(settings))
    assert found.of_process("zero2", 1).host == (2 + 2) * WEIGHTS
    assert found.of_process("fsdp2", 1).host == found.of_process("ddp", 2).host == (2 + 2 + 4) * WEIGHTS
    assert capture_options(object()) == {"capture_bytes": None, "on_host": False, "pulls": True, "returns": False}


def test_processes_share_what_a_layout_splits() -> None:
    """W, G, two moments, f, r and the backup: 1 + 1 + 2 + 3 copies; DeepSpeed has a master besides."""
    whole = Preflight(3, 60, 60, weights=240, gradients=240, optimizer=480, buffers=720, reference=0)
    copies = {"ddp": 7.0, "fsdp2": 7 / 4, "zero1": 2 + 6 / 4, "zero2": 1 + 7 / 4, "zero3": 8 / 4}
    for layout, count in copies.items():
        assert whole.peak_per_process(layout, 4) == 240 * count, layout
    low = replace(whole, bf16=True)
    assert low.of_process("zero1", 4).weights == 120 + 60 and low.of_process("zero1", 4).gradients == 120
    assert low.of_process("zero3", 4).weights == 30 + 60 and low.of_process("ddp", 4).weights == 240


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p),
        lambda p: torch.optim.AdamW(p),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.RMSprop(p),
        lambda p: Adafactor(p, lr=0.1, relative_step=False, scale_parameter=False),
        lambda p: Adafactor(p, lr=0.1, relative_step=False, scale_parameter=False, beta1=0.9),
    ],
    ids=["sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop", "adafactor", "adafactor, first moment"],
)
def test_optimizer_memory_is_that_of_its_state_after_a_step(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = CleanLM()
    optimizer = make(model.parameters())
    estimate = preflight(model, build_rule("rosu"), optimizer)
    get_loss("nll", "retain").function(model, BATCH, LossContext()).backward()
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim() > 0]
    assert estimate.optimizer == size(state)
    assert estimate.gradients == size(p.grad for p in model.parameters())


def test_frozen_weights_cost_their_own_memory_only_and_tied_ones_once() -> None:
    model = CleanLM(tied=True)
    model.mix.requires_grad_(False)
    estimate = preflight(model, build_rule("graddiff"), torch.optim.AdamW(model.parameters()), reference_bytes=123)
    total = WEIGHTS - EMBEDDINGS
    trained = total - (24 * 24 + 24)
    assert estimate == Preflight(
        passes=2,
        trainable=trained,
        total=total,
        weights=4 * total,
        gradients=4 * trained,
        optimizer=8 * trained,
        buffers=4 * trained,
        reference=123,
    )
    assert estimate.peak == 4 * total + 16 * trained + 123


def test_mixed_types_count_their_own_width() -> None:
    model = CleanLM()
    model.embed.bfloat16().requires_grad_(False)
    estimate = preflight(model, build_rule("rosu"), torch.optim.SGD(model.parameters(), lr=0.1))
    assert estimate.weights == 2 * EMBEDDINGS + 4 * (WEIGHTS - EMBEDDINGS)
    assert estimate.gradients == 4 * (WEIGHTS - EMBEDDINGS)


def test_the_sentence_says_passes_share_and_sizes_in_readable_units() -> None:
    line = Preflight(3, 250, 1000, 2**31, 2**20, 2**21, 3 * 2**29, 2**22).line()
    assert "3 forward+backward passes" in line
    assert "250 of 1,000 parameters trainable (25 %)" in line
    for part in ("weights 2.00 GiB", "gradients 1.0 MiB", "optimizer 2.0 MiB", "backup 1.50 GiB", "model 4.0 MiB"):
        assert part in line
    assert "peak 3.51 GiB" in line  # 2 + 1.5 GiB and 7 MiB


def test_an_empty_share_does_not_divide_by_zero() -> None:
    assert "0 of 0 parameters" in Preflight(1, 0, 0, 0, 0, 0, 0, 0).line()
