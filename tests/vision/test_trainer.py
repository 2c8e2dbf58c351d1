"""The trainer's steps on images are Algorithm 1 with momentum and weight decay; BatchNorm keeps the rules."""

from __future__ import annotations

import copy
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.func import functional_call

from rosu_llm import ROSUConfig
from rosu_llm.errors import ConfigError, DataError
from rosu_llm.vision.batches import normalised
from rosu_llm.vision.settings import VisionConfig, build_vision
from rosu_llm.vision.trainer import VisionTrainer, running_statistics
from tests.algorithm1 import Flat, surrogate_step
from tests.models import flat
from tests.vision.small import MEAN, STD, SmallCNN, images, trainer


def recorded(made: Any) -> list[Any]:
    """The batches of every window, as the step saw them."""
    seen: list[Any] = []
    update = made._update
    made._update = lambda model, batches: (seen.append(copy.deepcopy(batches)), update(model, batches))[1]
    return seen


@pytest.mark.parametrize("batch_norm", ["separate", "eval"])
def test_three_steps_are_algorithm_1_with_momentum_and_weight_decay_in_float64(tmp_path: Path, batch_norm: str) -> None:
    model = SmallCNN().double()
    made = trainer(model, tmp_path, batch_norm=batch_norm, momentum=0.9, weight_decay=0.05, retain=16)
    seen = recorded(made)
    twin = copy.deepcopy(model)
    made.train()
    twin.train(batch_norm == "separate")
    space = Flat(twin)
    w, buffer = space.vector(), None
    for step, (batch,) in enumerate(seen):

        def loss(part: dict[str, Tensor]) -> Any:
            def value(weights: dict[str, Tensor]) -> Tensor:
                logits = functional_call(twin, weights, (part["pixel_values"].double(),)).logits
                return -logits.log_softmax(-1)[torch.arange(len(logits)), part["labels"]].mean()

            return value

        decay = 0.5 * (1.0 + cos(pi * step / 3))  # of η and of ρ
        eta, rho = 0.1 * decay, 0.3 * decay
        delta, v = surrogate_step(space, w, loss(batch["forget"]), loss(batch["retain"]), rho=rho)
        total = v + 0.05 * w
        buffer = total if buffer is None else 0.9 * buffer + total
        w = w - eta * buffer + (eta / rho) * delta  # β tied
    start = flat(SmallCNN().double().parameters())
    assert float((flat(model.parameters()) - w).norm() / (w - start).norm()) < 1e-9


def test_accumulated_windows_are_one_batch_where_statistics_are_fixed(tmp_path: Path) -> None:
    found = []
    for size, steps in ((16, 1), (4, 4)):
        model = SmallCNN().double()
        made = trainer(
            model, tmp_path, forget=size, retain=size, gradient_accumulation_steps=steps, batch_norm="eval", max_steps=2
        )
        made.train()
        found.append(flat(model.parameters()))
        assert torch.equal(model.norm.running_mean, SmallCNN().double().norm.running_mean)
    assert float((found[0] - found[1]).norm()) < 1e-9 * float(
        (found[0] - flat(SmallCNN().double().parameters())).norm()
    )


def test_running_statistics_are_of_retain_batches_at_w_alone(tmp_path: Path) -> None:
    model = SmallCNN()
    twin = copy.deepcopy(model).train()
    made = trainer(model, tmp_path, max_steps=1)
    seen = recorded(made)
    made.train()
    twin(seen[0][0]["retain"]["pixel_values"])
    assert torch.equal(model.norm.running_mean, twin.norm.running_mean)
    assert torch.equal(model.norm.running_var, twin.norm.running_var)
    assert int(model.norm.num_batches_tracked) == 1


def test_joint_batches_are_normalised_together(tmp_path: Path) -> None:
    """UAM's way: the gradient of L_f and L_r over the statistics of both."""
    model = SmallCNN().double()
    made = trainer(model, tmp_path, batch_norm="joint", method="graddiff", momentum=0.0, weight_decay=0.0, max_steps=1)
    seen = recorded(made)
    twin = copy.deepcopy(model).train()
    made.train()
    (batch,) = seen[0]
    labels = [batch[part]["labels"] for part in ("forget", "retain")]
    logits = twin(torch.cat([batch[part]["pixel_values"] for part in ("forget", "retain")])).logits
    loss = functional.cross_entropy(logits[8:], labels[1]) - functional.cross_entropy(logits[:8], labels[0])
    expected = flat(twin.parameters()) - 0.1 * flat(torch.autograd.grad(loss, list(twin.parameters())))
    # the order of a batch's rows changes sums in the last digits; pixels are float32
    assert torch.allclose(flat(model.parameters()), expected, atol=1e-9)


@pytest.mark.parametrize("beyond", ["leave", "reverse", "return"])
@pytest.mark.parametrize("until", [1.4, "holdout"])
def test_bounded_forgetting_weighs_every_image(until: float | str, beyond: str, tmp_path: Path) -> None:
    """v = ∇L_r − Σ wᵢ∇ℓᵢ/n with wᵢ = clip((Tᵢ − ℓᵢ)/margin, 0, 1), by a loop over images in float64.

    Weights go down to −1 with ``reverse``, and with ``return``, for what returns is part of L_r.

    Tᵢ of ``holdout`` is drawn once for each of the 16 forget images, whatever crop of it a batch shows.
    """
    model = SmallCNN().double()
    options = {"method": "graddiff", "momentum": 0.0, "weight_decay": 0.0, "lr_scheduler_type": "constant"}
    bound = {"forget_until": until, "forget_margin": 0.05, "forget_beyond": beyond}
    made = trainer(model, tmp_path, batch_norm="eval", **bound, **options)
    seen, twin, every = recorded(made), copy.deepcopy(model).eval(), images()
    made.train()

    def losses(pixels: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(twin(pixels.double()).logits, labels, reduction="none")

    targets = dict.fromkeys(range(16), 1.4)
    if until == "holdout":
        unseen = losses(normalised(every.pixels[40:], MEAN, STD), every.labels[40:]).detach().numpy()
        values = np.quantile(unseen, (np.arange(16) + 0.5) / 16)
        targets = {row: float(values[i]) for row, i in enumerate(np.random.default_rng(made.args.seed).permutation(16))}
    parameters, weights = list(twin.parameters()), []
    for (batch,) in seen:
        forget, retain = batch["forget"], batch["retain"]
        total = losses(retain["pixel_values"], retain["labels"]).mean()
        for i, row in enumerate(forget["rows"].tolist()):
            own = losses(forget["pixel_values"][i : i + 1], forget["labels"][i : i + 1])[0]
            least = 0.0 if beyond == "leave" else -1.0
            weights.append(min(max((targets[row] - float(own)) / 0.05, least), 1.0))
            total = total - weights[-1] * own / len(forget["labels"])
        for p, g in zip(parameters, torch.autograd.grad(total, parameters), strict=True):
            p.data -= 0.1 * g
    moved = float((flat(parameters) - flat(SmallCNN().double().parameters())).norm())
    assert float((flat(model.parameters()) - flat(parameters)).norm()) < 1e-9 * moved
    assert least in weights and 1.0 in weights and any(0.0 < w < 1.0 for w in weights)
    assert {"depth/reached", "depth/target"} <= made.state.log_history[0].keys()


def test_l1_is_descent_on_the_penalised_loss_with_a_falling_weight(tmp_path: Path) -> None:
    model = SmallCNN().double()
    made = trainer(model, tmp_path, method="ft", l1=0.02, momentum=0.9, weight_decay=0.01, lr_scheduler_type="constant")
    seen = recorded(made)
    twin = copy.deepcopy(model).train()
    made.train()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for step, (batch,) in enumerate(seen):
        optimizer.zero_grad()
        loss = functional.cross_entropy(twin(batch["retain"]["pixel_values"]).logits, batch["retain"]["labels"])
        gamma = 0.02 * (1.0 - step / 3)
        (loss + gamma * sum(p.abs().sum() for p in twin.parameters())).backward()
        optimizer.step()
    assert torch.allclose(flat(model.parameters()), flat(twin.parameters()), atol=1e-12)


def test_learning_rates_drop_at_shares_of_the_run(tmp_path: Path) -> None:
    made = trainer(
        SmallCNN(),
        tmp_path,
        method="ft",
        max_steps=8,
        lr_drops=[0.5, 0.75],
        lr_scheduler_type="constant",
        learning_rate=0.1,
    )
    made.train()
    rates = [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.1] * 4 + [0.01] * 2 + [0.001] * 2)


@pytest.mark.parametrize("method", ["orthograd", "gu", "rosu"])
def test_single_images_are_seen_by_running_statistics(method: str, tmp_path: Path) -> None:
    """A protected gradient is that of one image in evaluation mode."""
    model = SmallCNN().double()
    options = {"protect_rank": 2} if method == "rosu" else {}
    made = trainer(model, tmp_path, method=method, max_steps=1, **options)
    twin = copy.deepcopy(model)
    seen: list[Any] = []
    closures = made._sample_closures

    def look(inner: Any, batches: Any) -> Any:
        found = closures(inner, batches)
        inner.zero_grad(set_to_none=True)
        seen.append((found[0]().detach(), copy.deepcopy(batches)))
        return found

    made._sample_closures = look  # type: ignore[method-assign]
    made.train()
    loss, batches = seen[0]
    logits = twin.eval()(batches[0]["retain"]["pixel_values"]).logits
    each = functional.cross_entropy(logits, batches[0]["retain"]["labels"], reduction="none")
    assert float((each - loss).abs().min()) < 1e-12


def test_mixed_precision_takes_the_same_step_up_to_its_rounding(tmp_path: Path) -> None:
    found = []
    for mixed in (False, True):
        model = SmallCNN()
        trainer(model, tmp_path, max_steps=1, bf16=mixed).train()
        assert next(model.parameters()).dtype == torch.float32
        found.append(flat(model.parameters()))
    start = flat(SmallCNN().parameters())
    # bfloat16 has 8 bits: single products are off by up to 2⁻⁹, and q is a difference of gradients
    assert float((found[0] - found[1]).norm() / (found[0] - start).norm()) < 0.05


def test_another_trainers_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="ROSUConfig without the settings of images"):
        VisionTrainer(SmallCNN(), ROSUConfig(use_cpu=True))  # type: ignore[arg-type]


def test_running_statistics_puts_every_layer_back() -> None:
    model = SmallCNN().train()
    with running_statistics(model):
        assert not model.norm.training and model.training
    assert model.norm.training


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"forget": 1, "retain": 1}, "per_device_train_batch_size=1: .* one image has no statistics"),
        ({"forget": 1, "retain": 4}, "per_device_train_batch_size=1: .* one image has no statistics"),
    ],
)
def test_batchnorm_with_one_image_is_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer(SmallCNN(), tmp_path, **settings)
    trainer(SmallCNN(), tmp_path, batch_norm="eval", **settings)


def test_an_epoch_without_a_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="An epoch has 32 pairs, fewer than one batch of 64"):
        trainer(SmallCNN(), tmp_path, forget=64, retain=64)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_norm": "off"}, "Unknown batch_norm"),
        ({"momentum": 1.0}, "momentum"),
        ({"l1": -1.0}, "l1=-1.0 would grow"),
        ({"l1": 1e-5, "fp16": True}, "l1=1e-05 and fp16: .* use bf16"),
        ({"lr_drops": [100.0]}, "shares of the run"),
        ({"forget_until": "base"}, "the loss 'classification' has one label: give forget_until='holdout' or a number"),
        ({"forget_until": 2.0, "forget_level": "token"}, "forget_level='sequence'"),
        ({"forget_until": 2.0, "forget_level": "both"}, "forget_level='sequence'"),
        ({"forget_until": 2.0, "keep_best": "depth"}, "measures answer tokens"),
        ({"budget": 0.1}, "measures answer tokens"),
        ({"retain_loss": "nll"}, "different models"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        VisionConfig(output_dir=str(tmp_path), use_cpu=True, **settings)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "data is missing"),
        ({"data": "x", "protocol": "all"}, "Unknown protocol"),
        ({"data": "x", "one_step": "fisher"}, "Unknown one_step"),
        ({"data": "x", "widht": 3}, "Did you mean width"),
        ({"data": "x", "width": "wide"}, "width='wide' cannot be read"),
        ({"data": "x", "edit_strength": 0}, "edits nothing"),
        ({"data": "x", "std": [1.0, 0.0, 1.0]}, "three numbers"),
    ],
)
def test_recipes_that_cannot_work(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_vision({"use_cpu": True, **values})
