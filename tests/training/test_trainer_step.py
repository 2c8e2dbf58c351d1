"""``ROSUTrainer``'s step is Algorithm 1, whatever way the window is cut into micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import SequentialSampler

from rosu_llm import ForgetRetainCollator, ROSUConfig, ROSUTrainer
from rosu_llm.errors import DataError
from tests.algorithm1 import Flat, algorithm_1, mean_nll, surrogate_step
from tests.models import CleanLM, flat, samples, tiny_llama

FORGET, RETAIN = samples(8, seed=1), samples(8, seed=2)


class Pairs(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sample i of the one with sample i of the other."""

    def __init__(self, forget: list[Any], retain: list[Any]) -> None:
        self.forget, self.retain = forget, retain

    def __len__(self) -> int:
        return len(self.forget)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"forget": self.forget[i], "retain": self.retain[i]}


class InOrder(ROSUTrainer):
    """Without shuffling, so that the window is known."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def train(model: nn.Module, folder: Path, *, pairs: Any = None, optimizer: Any = None, **settings: Any) -> InOrder:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 8,
        "max_steps": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "weight_decay": 0.0,
        "optim": "sgd",
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "rho": 0.3,
    }
    trainer = InOrder(
        model,
        ROSUConfig(**{**defaults, **settings}),
        train_dataset=pairs or Pairs(FORGET, RETAIN),
        data_collator=ForgetRetainCollator(0),
        optimizers=(optimizer, None),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("jacobian", ["relaxed", "none"])
def test_one_step_is_algorithm_1_in_float64(tmp_path: Path, jacobian: str) -> None:
    model = CleanLM().double()
    w, expected = algorithm_1(model, FORGET, RETAIN, eta=0.1, rho=0.3, beta=0.1 / 0.3, zero_order=jacobian == "none")
    train(model, tmp_path, jacobian=jacobian)
    # float64 from end to end
    assert float((flat(model.parameters()) - expected).norm() / (expected - w).norm()) < 1e-9


def test_one_step_is_algorithm_1_on_a_llama(tmp_path: Path) -> None:
    model = tiny_llama()
    w, expected = algorithm_1(model, FORGET, RETAIN, eta=0.1, rho=0.3, beta=0.1 / 0.3)
    train(model, tmp_path)
    # HF's Llama computes in float32: gradients carry about 1e-6, the update 1e-4 at most
    assert float((flat(model.parameters()) - expected).norm() / (expected - w).norm()) < 1e-4


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (2, 4)])
def test_what_is_beyond_its_target_is_kept_in_algorithm_1(batch: int, accumulation: int, tmp_path: Path) -> None:
    """L_f = Σ w⁺ℓ/n over the forget tokens and L_r = (mean over the retain tokens) + Σ w⁻ℓ/n, with the weights at w.

    So δ is neutral to retain data and returning tokens together, and both are descended at w+δ.
    """
    model = CleanLM().double()
    space, level, margin = Flat(model), 4.2, 0.3

    def tokens(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        alone = [[{**s, "labels": [t if i == at else -100 for i, t in enumerate(s["labels"])]}] for s in FORGET
                 for at in range(1, len(s["labels"])) if s["labels"][at] != -100]  # fmt: skip
        return torch.stack([mean_nll(model, weights, one) for one in alone])

    w = space.vector()
    share = ((level - tokens(space.weights(w)).detach()) / margin).clamp(-1.0, 1.0)
    assert share.max() == 1.0 and share.min() == -1.0 and ((share > 0.0) & (share < 1.0)).any()
    loss_f = lambda weights: (share.clamp(min=0.0) * tokens(weights)).mean()
    loss_r = lambda weights: mean_nll(model, weights, RETAIN) + ((-share).clamp(min=0.0) * tokens(weights)).mean()
    delta, v = surrogate_step(space, w, loss_f, loss_r, rho=0.3)
    how: dict[str, Any] = {"forget_until": level, "forget_margin": margin, "forget_level": "token"}
    how |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    train(model, tmp_path, **how, forget_beyond="return")
    moved = 0.1 / 0.3 * delta - 0.1 * v
    # float64 from end to end
    assert float((flat(model.parameters()) - w - moved).norm() / moved.norm()) < 1e-9


@pytest.mark.parametrize("method", ["rosu", "graddiff"])
@pytest.mark.parametrize("forget_loss", ["nll", "simnpo", "npo"])
def test_eight_times_one_equals_one_times_eight(tmp_path: Path, method: str, forget_loss: str) -> None:
    """Ragged batches, dropout off: accumulation is only a way to cut the window."""
    results = []
    for batch, accumulation in ((8, 1), (1, 8), (2, 4)):
        model = CleanLM().double()
        train(
            model, tmp_path, method=method, forget_loss=forget_loss,
            per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        results.append(flat(model.parameters()))
    size = (results[0] - flat(CleanLM().double().parameters())).norm()
    for other in results[1:]:
        # float64; NPO's reference log-probabilities are looked up as float32
        assert float((other - results[0]).norm() / size) < (1e-6 if forget_loss == "npo" else 1e-12)


def test_micro_mean_is_the_mean_of_micro_batch_means(tmp_path: Path) -> None:
    """On ragged micro-batches of one it weighs samples, not tokens: another number than the default."""
    logs = {}
    for reduction in ("window_tokens", "micro_mean"):
        model = CleanLM().double()
        trainer = train(
            model, tmp_path, reduction=reduction, per_device_train_batch_size=1, gradient_accumulation_steps=8
        )
        logs[reduction] = trainer.state.log_history[0]["loss/retain"]

    fresh = CleanLM().double()
    weights = Flat(fresh).weights(Flat(fresh).vector())
    per_sample = torch.stack([mean_nll(fresh, weights, [sample]) for sample in RETAIN])
    assert logs["micro_mean"] == pytest.approx(float(per_sample.mean()), rel=1e-9)
    assert logs["window_tokens"] == pytest.approx(float(mean_nll(fresh, weights, RETAIN)), rel=1e-9)
    assert logs["micro_mean"] != pytest.approx(logs["window_tokens"], rel=1e-4)


def test_gradient_checkpointing_changes_nothing_with_dropout_on(tmp_path: Path) -> None:
    results = []
    for checkpointing in (False, True):
        model = tiny_llama(dropout=0.3, attn_implementation="eager")
        train(model, tmp_path, gradient_checkpointing=checkpointing, max_steps=2)
        results.append(flat(model.parameters()))
    assert torch.equal(results[0], results[1])


def adapter_after(folder: Path, dtype: torch.dtype, **settings: Any) -> torch.Tensor:
    """The adapter of a frozen Llama after two steps; B starts at zero."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_llama(dtype=dtype), lora)
    train(model, folder, max_steps=2, **settings)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(bool(p.any()) for name, p in trained.items() if "lora_B" in name)
    return flat(trained.values())


@pytest.mark.parametrize(("dtype", "bf16"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_adapters_train_behind_checkpointed_frozen_layers(tmp_path: Path, dtype: torch.dtype, bf16: bool) -> None:
    plain = adapter_after(tmp_path, dtype, bf16=bf16)
    for reentrant in (True, False):
        how = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        found = adapter_after(tmp_path, dtype, bf16=bf16, **how)
        assert float((found - plain).abs().max()) <= 1e-6


def test_adapters_train_also_where_transformers_opens_no_path_for_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before transformers 5, where no gradient came through frozen layers with reentrant checkpointing."""
    from functools import partial

    from torch.utils.checkpoint import checkpoint
    from transformers import LlamaForCausalLM

    def enable(self: Any, gradient_checkpointing_kwargs: Any = None, **_: Any) -> None:
        how = partial(checkpoint, **gradient_checkpointing_kwargs)
        self._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=how)

    plain = adapter_after(tmp_path, torch.float32)
    monkeypatch.setattr(LlamaForCausalLM, "gradient_checkpointing_enable", enable)
    how = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    assert float((adapter_after(tmp_path, torch.float32, **how) - plain).abs().max()) <= 1e-6
    monkeypatch.setattr("rosu_llm.training.trainer.let_gradients_through", lambda model: None)
    with pytest.raises(RuntimeError, match="does not require grad"):
        adapter_after(tmp_path, torch.float32, **how)


def test_a_compiled_model_gives_the_same_weights(tmp_path: Path) -> None:
    """The graph reads weights as inputs, so that it sees them perturbed and restored."""
    results = []
    for settings in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        model = tiny_llama(num_hidden_layers=1)
        train(model, tmp_path, max_steps=3, **settings)
        results.append(flat(model.parameters()))
    moved = (results[0] - flat(tiny_llama(num_hidden_layers=1).parameters())).norm()
    assert float((results[1] - results[0]).norm() / moved) <= 1e-5


def test_rho_to_zero_is_retain_descent_plus_the_pull(tmp_path: Path) -> None:
    model = CleanLM().double()
    w, retain = algorithm_1(model, FORGET, RETAIN, eta=0.1, rho=1.0, beta=0.0, eps_q=float("inf"))
    _, pulled = algorithm_1(model, FORGET, RETAIN, eta=0.0, rho=1.0, beta=1.0)
    train(model, tmp_path, rho=1e-9)
    expected = retain + 0.1 * (pulled - w)
    assert float((flat(model.parameters()) - expected).norm() / (expected - w).norm()) < 1e-6  # O(ρ) and rounding


def test_clipping_applies_to_the_descent_gradient_only(tmp_path: Path) -> None:
    """max_grad_norm shortens v; the direct pull is not the optimizer's business."""
    model = CleanLM().double()
    w, algorithm = algorithm_1(model, FORGET, RETAIN, eta=1.0, rho=0.3, beta=0.0)
    _, pulled = algorithm_1(model, FORGET, RETAIN, eta=0.0, rho=0.3, beta=0.2)
    v = w - algorithm
    train(model, tmp_path, max_grad_norm=0.05, beta=0.2)
    expected = pulled - 0.1 * v * 0.05 / v.norm()
    # torch's clipping divides by the norm + 1e-6
    assert float((flat(model.parameters()) - expected).norm() / (expected - w).norm()) < 1e-5


def test_no_step_and_no_pull_while_the_learning_rate_is_zero(tmp_path: Path) -> None:
    for amplify, beta in (("auto", 0.5), ("direct", "tied"), ("matched", "tied"), ("optimizer", "tied")):
        model = CleanLM().double()
        before = flat(model.parameters())
        train(model, tmp_path, learning_rate=0.0, amplify=amplify, beta=beta)
        assert torch.equal(flat(model.parameters()), before), (amplify, beta)


def test_only_the_optimizers_parameters_take_part(tmp_path: Path) -> None:
    model = CleanLM().double()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("out"))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    w, expected = algorithm_1(model, FORGET, RETAIN, eta=0.1, rho=0.3, beta=0.1 / 0.3)
    train(model, tmp_path)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert float((flat(trained) - expected).norm() / (expected - w).norm()) < 1e-9
    for name, p in model.named_parameters():
        if not p.requires_grad:
            assert torch.equal(p, before[name])


def test_tied_weights_are_counted_once(tmp_path: Path) -> None:
    model = CleanLM(tied=True).double()
    w, expected = algorithm_1(model, FORGET, RETAIN, eta=0.1, rho=0.3, beta=0.1 / 0.3)
    train(model, tmp_path)
    assert float((flat(model.parameters()) - expected).norm() / (expected - w).norm()) < 1e-9


def test_a_larger_retain_batch(tmp_path: Path) -> None:
    model = CleanLM().double()
    retain = samples(16, seed=9)
    w, expected = algorithm_1(model, FORGET, retain, eta=0.1, rho=0.3, beta=0.1 / 0.3)
    pairs = [{"forget": FORGET[i], "retain": [retain[2 * i], retain[2 * i + 1]]} for i in range(8)]
    train(model, tmp_path, pairs=pairs)
    assert float((flat(model.parameters()) - expected).norm() / (expected - w).norm()) < 1e-9


def test_an_exception_in_the_middle_of_a_step_leaves_the_weights(tmp_path: Path) -> None:
    model = CleanLM()
    before = flat(model.parameters())
    calls = []

    def interrupt(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:  # forget, retain, surrogate
            raise KeyboardInterrupt

    model.out.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path)
    assert torch.equal(flat(model.parameters()), before)


@pytest.mark.parametrize("missing", ["forget", "retain"])
def test_a_batch_without_a_part_is_one_clear_error(tmp_path: Path, missing: str) -> None:
    model = CleanLM()
    before = flat(model.parameters())
    other = "retain" if missing == "forget" else "forget"
    with pytest.raises(DataError, match=f"no '{missing}'"):
        train(model, tmp_path, pairs=[{other: sample} for sample in FORGET])
    assert torch.equal(flat(model.parameters()), before)


def test_a_plain_batch_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ForgetRetainDataset"):
        train(CleanLM(), tmp_path, pairs=FORGET)
