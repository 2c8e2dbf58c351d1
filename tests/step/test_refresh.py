"""The whole retain set's gradient as memory: steps against a transcription, neutrality, resuming, what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from rosu_llm import ForgetRetainCollator, ForgetRetainDataset, ROSUTrainer, UnlearningStep
from rosu_llm.errors import ConfigError, DataError
from rosu_llm.geometry.slots import MEMORY
from rosu_llm.representation.config import RepresentationArguments
from rosu_llm.step.engine import StepEngine
from tests.models import CleanLM, flat, samples, tiny_llama
from tests.step.test_memory import RATE, RHO, gradient, loss, outside, put
from tests.training.test_trainer import FORGET, RETAIN, config

WHOLE, EVERY = samples(9, seed=40), 3


@pytest.mark.parametrize("protect", ["memory", "both"])
def test_steps_are_those_of_a_transcription(protect: str) -> None:
    model, twin = CleanLM(seed=2).double(), CleanLM(seed=2).double()
    step = UnlearningStep(
        model, torch.optim.SGD(model.parameters(), lr=RATE), rho=RHO, protect=protect, memory_refresh=EVERY
    )
    w, memory = flat(twin.parameters()), torch.zeros(())
    for t in range(5):
        forget, retain = samples(4, seed=10 + t), samples(5, seed=20 + t)
        if step.refresh_due():
            step.refresh([lambda: loss(model, WHOLE)])
        step(lambda f=forget: loss(model, f), lambda r=retain: loss(model, r))
        put(twin, w)
        if t % EVERY == 0:
            memory = gradient(twin, WHOLE)
        f, r = gradient(twin, forget), gradient(twin, retain)
        basis = [memory] if protect == "memory" else [r, memory]
        q = outside(basis, f)
        alpha = RHO / q.norm()
        put(twin, w + alpha * q)
        s = gradient(twin, retain)
        v = s + alpha * (outside(basis, s) - (q @ s) / (q @ q) * q)
        before, w = w, w + RATE / RHO * alpha * q - RATE * v
        assert float((flat(model.parameters()) - w).norm()) < 1e-9 * float((w - before).norm())  # float64
        assert torch.allclose(flat(step.space.memory[MEMORY]), memory, rtol=1e-12, atol=1e-14)


def test_a_step_without_the_gradient_that_is_due_is_an_error() -> None:
    model = CleanLM()
    step = UnlearningStep(
        model, torch.optim.SGD(model.parameters(), lr=RATE), rho=RHO, protect="memory", memory_refresh=2
    )
    closures = (lambda: loss(model, samples(2, seed=1))), (lambda: loss(model, samples(2, seed=2)))
    with pytest.raises(DataError, match=r"at step 0: call refresh\(\)"):
        step(*closures)
    step.refresh(lambda: loss(model, WHOLE))
    held = step.space.held_bytes()
    step(*closures)
    step(*closures)
    with pytest.raises(DataError, match=r"at step 2: call refresh\(\)"):
        step(*closures)
    before = step.space.held_bytes()
    step.refresh(lambda: loss(model, WHOLE))
    assert step.space.held_bytes() == before > held  # the old memory's tensors are used again


def test_a_gradient_that_overflows_is_taken_again() -> None:
    """Under loss scaling the step is skipped, and nothing infinite is kept."""
    model = CleanLM()
    step = UnlearningStep(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        rho=RHO,
        protect="memory",
        memory_refresh=5,
        loss_scaling=True,
    )
    window = {name: [lambda i=i: loss(model, samples(2, seed=i))] for i, name in enumerate(("forget", "retain"))}

    def overflows() -> Tensor:
        bent = loss(model, WHOLE)
        bent.register_hook(lambda grad: grad * float("inf"))
        return bent

    step.refresh(overflows)
    assert step.compute(window, step=0, total=5).skipped
    assert not step.space.memory
    assert step.refresh_due(1)
    step.refresh(lambda: loss(model, WHOLE))
    assert not step.compute(window, step=1, total=5).skipped


def trainer(folder: Path, data: Any = None, **settings: Any) -> ROSUTrainer:
    own = {"memory_dataset": settings.pop("memory_dataset", None), "memory_file": settings.pop("memory_file", None)}
    made = config(folder, **{"protect": "memory", "memory_refresh": 3, **settings})
    data = ForgetRetainDataset(FORGET, RETAIN) if data is None else data
    collator = ForgetRetainCollator()
    return ROSUTrainer(tiny_llama(dropout=0.1), made, train_dataset=data, data_collator=collator, **own)


def naive_gradient(model: Any, names: Iterable[str]) -> Tensor:
    """Of the mean loss over all answer tokens of the retain set, one sample at a time, without dropout."""
    twin = tiny_llama(dropout=0.1).eval()
    twin.load_state_dict(model.state_dict())
    total, count = torch.zeros(()), 0
    for row in RETAIN:
        labels = torch.tensor([row["labels"]])
        logits = twin(input_ids=torch.tensor([row["input_ids"]])).logits[:, :-1]
        total = total + torch.nn.functional.cross_entropy(logits[0], labels[0, 1:], ignore_index=-100, reduction="sum")
        count += int((labels[0, 1:] != -100).sum())
    return flat(torch.autograd.grad(total / count, [twin.get_parameter(name) for name in names]))


class Compare(TrainerCallback):
    """After the passes of every step: |cos| of δ and the whole retain gradient, and how far the memory is from it."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.cosines: list[float] = []
        self.misses: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        space = self.trainer._step.space
        whole = naive_gradient(kwargs["model"], self.trainer._trained())
        captured = {name: flat(own) for name, own in space._captured.items()}
        delta = torch.stack([c * captured[name] for name, c in self.trainer.delta.coefficients.items()]).sum(0)
        self.cosines.append(abs(float(delta @ whole / (delta.norm() * whole.norm()))))
        self.misses.append(float((captured[MEMORY] - whole).norm() / whole.norm()))


def test_after_a_refresh_the_step_is_neutral_to_the_whole_retain_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    t, compare = trainer(tmp_path), Compare()
    compare.trainer = t
    run = StepEngine.run

    def noting(engine: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = run(engine, *args, **kwargs)
        t.delta = outcome.inner.delta
        return outcome

    monkeypatch.setattr(StepEngine, "run", noting)
    t.add_callback(compare)
    with caplog.at_level(logging.INFO, "rosu_llm"):
        t.train()
    for fresh in (0, 3):
        assert compare.misses[fresh] < 1e-5  # float32, other batches
        assert compare.cosines[fresh] < 1e-6
    assert all(compare.cosines[old] > 1e-3 and compare.misses[old] > 1e-2 for old in (1, 2))
    assert "passes per step, and one over all retain data every 3 steps" in caplog.text


@pytest.mark.parametrize("saved", [2, 3])
def test_a_resumed_run_refreshes_at_the_same_steps(saved: int, tmp_path: Path) -> None:
    """Before step 3 the memory is that of step 0, and at step 3 it is taken anew."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": saved, "max_steps": 5, "protect": "both"}
    whole = trainer(tmp_path, **settings)
    whole.train()
    again = trainer(tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{saved}"))
    assert torch.equal(flat(whole.model.parameters()), flat(again.model.parameters()))
    (tmp_path / f"checkpoint-{saved}" / "rosu_memory_0.safetensors").unlink()
    with pytest.raises(ConfigError, match="rosu_memory_0"):
        trainer(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{saved}"))


def test_retain_samples_may_be_given_beside_the_pairs(tmp_path: Path) -> None:
    pairs = ForgetRetainDataset(FORGET, RETAIN)
    bare = [pairs[i] for i in range(len(pairs))]
    found = []
    for data, given in ((pairs, None), (bare, RETAIN)):
        t = trainer(tmp_path, data, max_steps=2, memory_dataset=given)
        t.train()
        found.append(flat(t.model.parameters()))
    assert torch.equal(*found)
    with pytest.raises(DataError, match="a list does not list"):
        trainer(tmp_path, bare)
    with pytest.raises(DataError, match="memory_dataset"):
        trainer(tmp_path, pairs, memory_dataset=iter(RETAIN))
    with pytest.raises(ConfigError, match="memory_file is for"):
        trainer(tmp_path, pairs, memory_file="x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_refresh": 5}, "protect='batch'"),
        ({"protect": "memory", "memory_refresh": -1}, "memory_refresh=-1"),
        ({"protect": "memory", "memory_refresh": 1.5}, "memory_refresh"),
        ({"protect": "memory", "memory_refresh": 5, "memory_decay": 0.5}, "memory_decay=0.5 has no effect"),
        ({"method": "minmax", "memory_refresh": 5}, "does nothing"),
    ],
)
def test_what_cannot_work(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **options)


def test_representation_level_has_no_answers() -> None:
    with pytest.raises(ConfigError, match="memory_refresh=5"):
        RepresentationArguments(protect="memory", memory_refresh=5).check_method()
