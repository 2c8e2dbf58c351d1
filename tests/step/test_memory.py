"""A memory of retain gradients: several steps against a transcription in float64, and what is refused or kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rosu_llm import ForgetRetainDataset, ROSUTrainer, UnlearningStep
from rosu_llm.errors import ConfigError
from rosu_llm.losses import COUNT, LossContext, get_loss
from tests.losses import naive
from tests.models import CleanLM, flat, samples, tiny_llama
from tests.training.test_trainer import FORGET, RETAIN, config

RATE, RHO, DECAY = 0.05, 0.2, 0.7


def loss(model: CleanLM, rows: list[naive.Sample]) -> Tensor:
    batch = naive.padded(rows, 14)
    return get_loss("nll", "retain").function(model, batch, LossContext()) / COUNT["token"](batch)


def gradient(model: CleanLM, rows: list[naive.Sample]) -> Tensor:
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss(model, rows), list(model.parameters()))])


def put(model: CleanLM, w: Tensor) -> None:
    torch.nn.utils.vector_to_parameters(w, model.parameters())


def outside(basis: list[Tensor], x: Tensor) -> Tensor:
    """(I − P) x by QR."""
    q, _ = torch.linalg.qr(torch.stack(basis, 1))
    return x - q @ (q.T @ x)


@pytest.mark.parametrize("protect", ["memory", "both"])
def test_steps_are_those_of_a_transcription(protect: str) -> None:
    model, twin = CleanLM(seed=2).double(), CleanLM(seed=2).double()
    step = UnlearningStep(
        model, torch.optim.SGD(model.parameters(), lr=RATE), rho=RHO, protect=protect, memory_decay=DECAY
    )
    w, memory = flat(twin.parameters()), torch.zeros(())
    for t in range(4):
        forget, retain = samples(4, seed=10 + t), samples(5, seed=20 + t)
        step(lambda f=forget: loss(model, f), lambda r=retain: loss(model, r))
        put(twin, w)
        f, r = gradient(twin, forget), gradient(twin, retain)
        memory = r if t == 0 else DECAY * memory + (1.0 - DECAY) * r
        basis = [memory] if protect == "memory" or t == 0 else [r, memory]
        q = outside(basis, f)
        alpha = RHO / q.norm()
        put(twin, w + alpha * q)
        s = gradient(twin, retain)
        v = s + alpha * (outside(basis, s) - (q @ s) / (q @ q) * q)
        before, w = w, w + RATE / RHO * alpha * q - RATE * v
        moved = float((w - before).norm())
        assert float((flat(model.parameters()) - w).norm()) < 1e-9 * moved  # float64; products of norm 1e-15


def test_a_decay_of_zero_protects_the_batch_alone() -> None:
    plain, remembered = CleanLM(seed=2).double(), CleanLM(seed=2).double()
    for model, options in ((plain, {}), (remembered, {"protect": "memory", "memory_decay": 0.0})):
        step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=RATE), rho=RHO, tau=0.0, **options)
        for t in range(3):
            forget, retain = samples(4, seed=10 + t), samples(5, seed=20 + t)
            step(lambda m=model, f=forget: loss(m, f), lambda m=model, r=retain: loss(m, r))
    assert torch.allclose(flat(plain.parameters()), flat(remembered.parameters()), rtol=1e-9, atol=1e-12)


def trainer(folder: Path, **settings: Any) -> ROSUTrainer:
    made = config(folder, protect="both", **settings)
    return ROSUTrainer(tiny_llama(dropout=0.1), made, train_dataset=ForgetRetainDataset(FORGET, RETAIN))


def test_the_memory_travels_with_checkpoints(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = trainer(tmp_path, **settings)
    whole.train()
    again = trainer(tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(flat(whole.model.parameters()), flat(again.model.parameters()))
    (tmp_path / "checkpoint-2" / "rosu_memory_0.safetensors").unlink()
    with pytest.raises(ConfigError, match="rosu_memory_0"):
        trainer(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protect": "all"}, "protect"),
        ({"protect": "memory", "memory_decay": 1.0}, "memory_decay"),
        ({"protect": "memory", "jacobian": "exact"}, "a memory"),
        ({"method": "minmax", "protect": "memory"}, "does nothing"),
    ],
)
def test_what_cannot_work(options: dict[str, Any], message: str) -> None:
    model = CleanLM()
    with pytest.raises(ConfigError, match=message):
        UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
