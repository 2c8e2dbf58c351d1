"""The initial model's figures: found by content, exact on disk, untouched by training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from rosu_llm.errors import DataError
from rosu_llm.losses import LossContext, ReferenceLogProbs, ReferenceModel, get_loss
from rosu_llm.losses.reference import sample_keys
from tests.losses import naive
from tests.models import CleanLM, samples, tiny_llama

BATCH = samples(4, seed=7)


# -- log-probabilities by content ---------------------------------------------------------------


def test_keys_do_not_depend_on_padding_side_width_token_or_neighbours() -> None:
    alone = [sample_keys(naive.padded([s], len(s["input_ids"])))[0] for s in BATCH]
    assert len(set(alone)) == len(BATCH)
    for width in (14, 20):
        for left in (False, True):
            for pad in (0, 7):
                assert sample_keys(naive.padded(BATCH, width, left=left, pad=pad)) == alone
    without_mask = {
        k: v for k, v in naive.padded(BATCH[:1], len(BATCH[0]["input_ids"])).items() if k != "attention_mask"
    }
    assert sample_keys(without_mask) == alone[:1]


def test_keys_tell_tokens_and_labels_apart() -> None:
    """Same tokens under another mask, or one token changed, is another sample."""
    base = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
    relabelled = {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8]}
    changed = {"input_ids": [5, 6, 7, 9], "labels": [-100, -100, 7, 9]}
    assert len(set(sample_keys(naive.padded([base, relabelled, changed], 4)))) == 3


def test_keys_do_not_depend_on_the_integer_type() -> None:
    batch = naive.padded(BATCH, 14)
    assert sample_keys({k: v.int() for k, v in batch.items()}) == sample_keys(batch)


def test_values_are_the_log_probabilities_of_the_loop_wherever_the_sample_turns_up() -> None:
    model = CleanLM(seed=4).double()
    reference = ReferenceLogProbs()
    reference.compute(model, [naive.padded(BATCH[:3], 14), naive.padded(BATCH[3:], 16, left=True)])
    expected = [naive.logprob(model, s) for s in BATCH]
    found = sorted(value for (value,) in reference.values.values())
    assert found == pytest.approx(sorted(expected), rel=1e-12)  # float64 sums of ≤ 11 terms
    shuffled = [BATCH[i] for i in (2, 0, 3, 1, 2)]
    got = reference(naive.padded(shuffled, 25, left=True, pad=3)).tolist()
    # handed out in float32: half a unit in the last place of numbers near 40
    assert got == pytest.approx([expected[i] for i in (2, 0, 3, 1, 2)], rel=1e-7)


def test_references_are_taken_without_dropout_and_the_mode_comes_back() -> None:
    torch.manual_seed(0)
    model = CleanLM(dropout=0.5).double()
    for training in (True, False):
        model.train(training)
        reference = ReferenceLogProbs()
        reference.compute(model, [naive.padded(BATCH, 14)])
        assert model.training is training
        model.eval()
        expected = [naive.logprob(model, s) for s in BATCH]
        assert [value for (value,) in reference.values.values()] == pytest.approx(
            expected, rel=1e-12
        )  # float64, order of sums


def test_the_mode_comes_back_when_computing_fails() -> None:
    model = CleanLM().train()
    with pytest.raises(KeyError):
        ReferenceLogProbs().compute(model, [{"input_ids": torch.tensor([[4, 5]])}])
    assert model.training


def test_a_sample_without_reference_is_an_error_that_counts_them() -> None:
    reference = ReferenceLogProbs()
    reference.compute(CleanLM(), [naive.padded(BATCH[:2], 14)])
    with pytest.raises(DataError, match="2 of 4 forget samples have no reference"):
        reference(naive.padded(BATCH, 14))


def test_saving_and_loading_is_exact(tmp_path: Path) -> None:
    reference = ReferenceLogProbs()
    reference.compute(CleanLM(seed=4).double(), [naive.padded(BATCH, 14)])
    reference.values["00" * 15 + "7f"] = (-0.1 - 0.2,)
    reference.save(tmp_path / "reference.safetensors")
    loaded = ReferenceLogProbs.load(tmp_path / "reference.safetensors")
    assert loaded.values == reference.values
    assert list(loaded.values) == list(reference.values)
    assert torch.equal(loaded(naive.padded(BATCH, 18)), reference(naive.padded(BATCH, 14)))


def test_no_values_at_all_survive_the_trip_too(tmp_path: Path) -> None:
    ReferenceLogProbs().save(tmp_path / "empty.safetensors")
    assert ReferenceLogProbs.load(tmp_path / "empty.safetensors").values == {}


def test_npo_with_stored_references_is_npo() -> None:
    """From the initial model through the stored values to the loss, against the loop."""
    initial, model = CleanLM(seed=1).double(), CleanLM(seed=2).double()
    reference = ReferenceLogProbs()
    reference.compute(initial, [naive.padded(BATCH, 14)])
    context = LossContext({"npo_beta": 0.5}, reference_logprobs=reference)
    got = get_loss("npo", "forget").function(model, naive.padded(BATCH, 20, left=True), context)
    # stored references reach the loss in float32
    assert float(got.detach()) == pytest.approx(naive.npo(model, BATCH, initial, 0.5), rel=1e-6)


# -- the frozen copy ------------------------------------------------------------------------------


def step(model: nn.Module, batch: dict[str, Any]) -> None:
    """Move the trainable weights visibly."""
    loss = get_loss("nll", "retain").function(model, batch, LossContext())
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.05)
                p.grad = None


def test_the_frozen_copy_stays_at_the_initial_weights() -> None:
    model = CleanLM(dropout=0.3).double().train()
    batch = naive.padded(BATCH, 14)
    model.eval()
    initial = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.detach()
    model.train()
    reference = ReferenceModel(model)
    for _ in range(3):
        step(model, batch)
        assert torch.equal(reference(batch), initial)
    moved = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert float((moved - initial).detach().abs().max()) > 1e-3


def test_copying_leaves_the_model_as_it_was() -> None:
    model = CleanLM(dropout=0.3).train()
    model.mix.weight.requires_grad_(False)
    reference = ReferenceModel(model)
    logits = reference(naive.padded(BATCH, 14))
    assert not logits.requires_grad
    assert model.training
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["mix.weight"]


@pytest.mark.parametrize("tied", [False, True])
def test_extra_bytes_are_those_of_the_copy_tied_weights_once(tied: bool) -> None:
    embeddings = 61 * 12 * (1 if tied else 2)
    others = (24 * 24 + 24) + (24 * 12 + 12)
    assert ReferenceModel(CleanLM(tied=tied)).extra_bytes == 4 * (embeddings + others)
    assert ReferenceModel(CleanLM(tied=tied).double()).extra_bytes == 8 * (embeddings + others)


# -- the adapter switched off -----------------------------------------------------------------------


def adapted(dropout: float = 0.0) -> tuple[Any, Any]:
    """A base model and a copy of it under a LoRA adapter."""
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=dropout)
    return tiny_llama(seed=5).eval(), get_peft_model(tiny_llama(seed=5), config)


def test_with_an_adapter_the_reference_is_the_base_model_and_costs_nothing() -> None:
    base, model = adapted(dropout=0.2)
    model.train()
    batch = naive.padded(BATCH, 14)
    reference = ReferenceModel(model)
    assert reference.extra_bytes == 0
    inputs = {k: batch[k] for k in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = base(**inputs).logits
    for _ in range(3):
        step(model, batch)
        assert torch.equal(reference(batch), expected)
    with torch.no_grad():
        moved = model.eval()(**inputs).logits
    assert float((moved - expected).abs().max()) > 1e-4


@pytest.mark.parametrize("training", [True, False])
def test_asking_the_reference_leaves_adapter_and_mode_on(training: bool) -> None:
    _, model = adapted()
    batch = naive.padded(BATCH, 14)
    reference = ReferenceModel(model)
    step(model, batch)
    model.eval()
    with torch.no_grad():
        before = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    model.train(training)
    reference(batch)
    assert model.training is training
    with pytest.raises(ValueError, match="input_ids"):
        reference({})
    assert model.training is training
    model.eval()
    with torch.no_grad():
        after = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert torch.equal(before, after)
    assert all(p.requires_grad for n, p in model.named_parameters() if "lora_" in n)


def test_an_adapter_that_has_learned_already_is_part_of_the_initial_model() -> None:
    """Switching it off would give another model than the one that training starts from: a copy is kept."""
    _, model = adapted()
    batch = naive.padded(BATCH, 14)
    step(model, batch)
    reference = ReferenceModel(model)
    assert reference.extra_bytes > 0
    with torch.no_grad():
        initial = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    step(model, batch)
    assert torch.equal(reference(batch), initial)


def test_kl_through_an_adapter_is_kl_to_the_base_model() -> None:
    base, model = adapted()
    batch = naive.padded(BATCH, 14)
    context = LossContext(reference_logits=ReferenceModel(model))
    kl = get_loss("kl", "retain")
    assert float(kl.function(model, batch, context).detach()) == pytest.approx(
        0.0, abs=1e-5
    )  # float32, 40·61 terms near 0.02
    for _ in range(3):
        step(model, batch)
    expected = naive.kl(model.eval(), BATCH, base)
    assert expected > 1e-3
    # float32 log-softmax (1e-7 each) against a KL of order 1e-2 summed over 40 tokens
    assert float(kl.function(model, batch, context).detach()) == pytest.approx(expected, rel=1e-3)
