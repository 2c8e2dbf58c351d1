"""Representation level on questions and answers, with all parameters: RMU as it is run on TOFU."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rosu_llm import ForgetRetainCollator, ForgetRetainDataset, RepresentationConfig, RepresentationTrainer
from rosu_llm.errors import ConfigError
from rosu_llm.recipes.run import run
from rosu_llm.recipes.settings import build
from rosu_llm.representation.losses import control_vectors
from tests.conftest import ROOT
from tests.models import flat, samples, tiny_decoder
from tests.training.tiny_world import World

LAYER, STEERING = 2, 3.0
Batch = dict[str, Tensor]


def config(folder: Path, **changes: Any) -> RepresentationConfig:
    values: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "method": "graddiff", "forget_loss": "rmu", "retain_loss": "representation", "reduction": "rmu",
        "answers_only": True, "trainable_parameters": None, "target_layer": LAYER, "steering": STEERING,
        "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4, "max_steps": 3, "logging_steps": 1, "retain_weight": 2.0,
    }  # fmt: skip
    return RepresentationConfig(**{**values, **changes})


def activations(model: Any, batch: Batch) -> Tensor:
    """h at layer ℓ by transformers' own way."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    found: Tensor = model(**inputs, output_hidden_states=True, use_cache=False).hidden_states[LAYER + 1]
    return found


def by_hand(model: Any, initial: Any, batch: dict[str, Batch], control: Tensor) -> dict[str, Tensor]:
    """Both losses, token by token: mean over answer tokens and hidden size."""
    result = {}
    for part in ("forget", "retain"):
        now = activations(model, batch[part])
        goal = control.expand_as(now) if part == "forget" else activations(initial, batch[part]).detach()
        terms = []
        for row, labels in enumerate(batch[part]["labels"].tolist()):
            terms += [(now[row, at] - goal[row, at]).square().mean() for at, y in enumerate(labels) if y != -100]
        result[part] = torch.stack(terms).mean()
    return result


def test_full_parameter_rmu_is_its_equation(tmp_path: Path) -> None:
    """Three steps of SGD on ‖h − c·u‖² + 2‖h − h₀‖² at the answers' tokens, one window for all of them."""
    forget, retain = samples(4, seed=1), samples(4, seed=2)
    model = tiny_decoder()
    initial, expected = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    pairs = [{"forget": f, "retain": [r]} for f, r in zip(forget, retain, strict=True)]
    batch = ForgetRetainCollator(0)(pairs)
    settings = config(tmp_path)
    control = control_vectors(settings.seed, STEERING)(batch["forget"], torch.zeros(1, 1, model.config.hidden_size))
    for _ in range(3):
        losses = by_hand(expected, initial, batch, control[:1])
        (losses["forget"] + 2.0 * losses["retain"]).backward()
        with torch.no_grad():
            for p in expected.parameters():
                if p.grad is not None:
                    p -= 0.5 * p.grad
                    p.grad = None
    trainer = RepresentationTrainer(model, settings, train_dataset=pairs)
    trainer.train()
    start, truth = flat(initial.parameters()), flat(expected.parameters())
    assert float((flat(model.parameters()) - truth).norm() / (truth - start).norm()) < 1e-4  # float32
    moved = [
        n for (n, p), q in zip(model.named_parameters(), initial.parameters(), strict=True) if not torch.equal(p, q)
    ]
    assert "model.embed_tokens.weight" in moved and not any(f"layers.{LAYER + 1}." in name for name in moved)
    assert any(f"layers.{LAYER}." in name for name in moved) and any("layers.0." in name for name in moved)


def test_a_run_on_questions_keeps_their_format_and_resumes(tmp_path: Path, tmp_path_factory: Any) -> None:
    world = World(tmp_path_factory.mktemp("world"))
    own = {"method": "graddiff", "forget_loss": "rmu", "retain_loss": "representation", "reduction": "rmu"}
    own |= {"answers_only": True, "trainable_parameters": None, "target_layer": 0, "steering": 2.0}
    own |= {"forget_data": f"{world.data}:forget10", "lr_scheduler_type": "constant"}
    run(build(world.settings(tmp_path / "whole", **own)))
    resume = {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-2")}
    run(build(world.settings(tmp_path / "again", **own, **resume)))
    whole, again = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "again"))
    assert whole == again
    assert [*(tmp_path / "whole").glob("*chat*.json")] or [*(tmp_path / "whole").glob("*format*.json")]
    with pytest.raises(ConfigError, match="answers_only reads questions and answers"):
        run(build({**world.settings(tmp_path / "lists", **own), "forget_data": ["a", "b"]}))


@pytest.mark.slow
@pytest.mark.skipif(
    "OPEN_UNLEARNING_DIR" not in os.environ or "OPEN_UNLEARNING_PYTHON" not in os.environ,
    reason="OPEN_UNLEARNING_DIR and OPEN_UNLEARNING_PYTHON name no checkout of OpenUnlearning and its interpreter",
)
@pytest.mark.parametrize("ragged", [False, True])
def test_losses_are_those_of_openunlearnings_own_code(ragged: bool, tmp_path: Path) -> None:
    """Equal where answers are equally long; else its [b]/[b,1] gives mean(S)·mean(1/n), and ours ΣS/Σn."""
    lengths = {"shortest": 6, "longest": 14} if ragged else {"shortest": 9, "longest": 9}
    pairs = ForgetRetainDataset(samples(4, seed=1, **lengths), samples(4, seed=2, **lengths))
    batch = ForgetRetainCollator(0)([pairs[i] for i in range(4)])
    initial, model = tiny_decoder(), tiny_decoder(seed=7)  # another model, so that the retain loss is not zero
    for name, each in (("initial", initial), ("model", model)):
        each.save_pretrained(tmp_path / name)
    settings = config(tmp_path)
    trainer = RepresentationTrainer(copy.deepcopy(initial), settings, train_dataset=pairs)
    trainer.model.load_state_dict(model.state_dict())
    trainer.model.eval()
    control = control_vectors(settings.seed, STEERING)(batch["forget"], torch.zeros(1, 1, model.config.hidden_size))[0]
    content = {part: {k: v.tolist() for k, v in batch[part].items()} for part in batch}
    (tmp_path / "batch.json").write_text(json.dumps({**content, "layer": LAYER, "control": control.flatten().tolist()}))
    command = [os.environ["OPEN_UNLEARNING_PYTHON"], str(ROOT / "tests" / "openunlearning" / "rmu_losses.py")]
    command += [os.environ["OPEN_UNLEARNING_DIR"], str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.strip().splitlines()[-1])
    for part in ("forget", "retain"):
        (closure,) = trainer.window_loss(part).closures(trainer.model, [batch[part]], part)
        ours = abs(float(closure()))
        counts = (batch[part]["labels"] != -100).sum(-1).double()
        # ΣS/Σn → mean(S)·mean(1/n)
        expected = ours * float(counts.mean() * (1.0 / counts).mean())
        assert theirs[part] == pytest.approx(expected, rel=1e-5)
        if not ragged:
            assert theirs[part] == pytest.approx(ours, rel=1e-5)
