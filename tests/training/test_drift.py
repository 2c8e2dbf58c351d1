"""KL as a budget: against a float64 loop over a copy of the initial model, roll-back, resuming, and what is refused."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from rosu_llm import ForgetRetainDataset, ROSUTrainer
from rosu_llm.errors import ConfigError, DataError
from rosu_llm.representation.config import RepresentationArguments
from rosu_llm.training.drift import DRIFT_FILE
from tests.models import CleanLM, flat, samples, tiny_decoder, tiny_llama
from tests.training.test_budget import KEPT
from tests.training.test_budget import trainer as budgeted
from tests.training.test_trainer import FORGET, RETAIN, config, logs


def trainer(folder: Path, **settings: Any) -> ROSUTrainer:
    return budgeted(folder, **{"budget": 10.0, "budget_measure": "kl", **settings})[0]


def naive_kl(initial: Any, current: Any) -> float:
    """Mean over answer tokens, one sample and one position at a time."""
    initial, current = copy.deepcopy(initial).eval(), copy.deepcopy(current).eval()
    total, count = 0.0, 0
    for row in KEPT:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            p, q = (model(input_ids=ids).logits[0].double().log_softmax(-1) for model in (initial, current))
        for place in range(len(row["labels"]) - 1):
            if row["labels"][place + 1] != -100:
                total += float((p[place].exp() * (p[place] - q[place])).sum())
                count += 1
    return total / count


@pytest.mark.parametrize("tied", [False, True])
def test_it_is_the_divergence_from_a_copy_of_the_initial_model(tied: bool, tmp_path: Path) -> None:
    initial = tiny_llama(tie_word_embeddings=tied)
    t = ROSUTrainer(
        copy.deepcopy(initial),
        config(tmp_path, budget=10.0, budget_measure="kl", budget_every=2, learning_rate=5e-2),
        train_dataset=ForgetRetainDataset(FORGET, RETAIN),
        budget_dataset=KEPT,
    )
    t.train()
    assert t._budget is not None and t._budget.initial is not None
    assert abs(t._budget.initial) < 1e-7  # before the first step; float32 log-probabilities
    last = logs(t)[-1]
    expected = naive_kl(initial, t.model)
    assert expected > 1e-2
    assert last["budget/kl"] == pytest.approx(expected, rel=1e-4)
    assert last["budget/rise"] == last["budget/kl"]
    assert not any("budget/loss" in entry for entry in logs(t))


def test_bf16_compute_starts_at_zero(tmp_path: Path) -> None:
    """The initial distributions are computed as the model computes its own."""
    t = trainer(tmp_path, bf16=True, max_steps=2, learning_rate=5e-2)
    t.train()
    assert t._budget is not None and t._budget.initial is not None
    assert abs(t._budget.initial) < 1e-6  # float32 log-probabilities of the same bf16 logits
    # 8 bits of mantissa in the pass that is measured
    assert logs(t)[-1]["budget/kl"] == pytest.approx(naive_kl(tiny_llama(dropout=0.1), t.model), rel=0.05)


def test_an_adapter_keeps_hidden_states_alone(tmp_path: Path) -> None:
    """The output layer is frozen: no copy of it, neither in memory nor in checkpoints."""
    from peft import LoraConfig

    initial = tiny_llama()
    t = ROSUTrainer(
        copy.deepcopy(initial),
        config(tmp_path, budget=10.0, budget_measure="kl", budget_every=2, learning_rate=5e-2, save_strategy="steps"),
        train_dataset=ForgetRetainDataset(FORGET, RETAIN),
        budget_dataset=KEPT,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    )
    t.train()
    tokens = sum(label != -100 for row in KEPT for label in row["labels"][1:])
    assert t._drift is not None
    assert t._drift.extra_bytes == tokens * 32 * 4
    assert logs(t)[-1]["budget/kl"] == pytest.approx(naive_kl(initial, t.model), rel=1e-3, abs=1e-7)


def test_outside_the_budget_the_run_goes_back_to_the_bits_it_had(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    t = trainer(tmp_path, budget=1e-5, budget_tries=0, learning_rate=5e-2)
    with caplog.at_level(logging.WARNING):
        t.train()
    assert t.state.global_step == 2
    assert torch.equal(flat(t.model.parameters()), flat(tiny_llama(dropout=0.1).parameters()))
    assert "the KL from the initial model is" in caplog.text
    assert "MiB of the initial model in host memory and in every checkpoint" in caplog.text


def test_resuming_between_looks_reproduces_the_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"budget": 0.01, "save_strategy": "steps", "save_steps": 3, "learning_rate": 5e-2}
    whole = trainer(tmp_path, **settings)
    whole.train()
    again = trainer(tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert torch.equal(flat(again.model.parameters()), flat(whole.model.parameters()))
    assert whole._budget is not None and again._budget is not None
    assert again._budget.state() == whole._budget.state()
    assert whole._budget.returns > 0
    looks = [[entry["budget/kl"] for entry in logs(t) if "budget/kl" in entry] for t in (whole, again)]
    assert looks[0] == looks[1]  # to the bit
    (tmp_path / "checkpoint-3" / DRIFT_FILE).unlink()
    with pytest.raises(ConfigError, match="rosu_budget_initial"):
        trainer(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_second_training_is_measured_from_before_the_first(tmp_path: Path) -> None:
    initial = tiny_llama(dropout=0.1)
    t = trainer(tmp_path, max_steps=2, learning_rate=5e-2)
    t.train()
    t.train()
    assert logs(t)[-1]["budget/kl"] == pytest.approx(naive_kl(initial, t.model), rel=1e-4)
    t.method_args.budget = 1e-3
    with pytest.raises(ConfigError, match=r"budget=0.001 is exceeded before the first step: .* nats"):
        t.train()


def test_other_tokens_than_before_the_first_step_are_an_error(tmp_path: Path) -> None:
    t = trainer(tmp_path)

    class Swap(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                t._budget_data = samples(6, seed=10)

    t.add_callback(Swap())
    with pytest.raises(DataError, match="budget_measure='loss'"):
        t.train()


def test_logits_that_are_changed_after_the_output_layer_are_refused(tmp_path: Path) -> None:
    model = tiny_decoder("gemma2", final_logit_softcapping=1.0)
    t = ROSUTrainer(
        model,
        config(tmp_path, budget=10.0, budget_measure="kl"),
        train_dataset=ForgetRetainDataset(FORGET, RETAIN),
        budget_dataset=KEPT,
    )
    with pytest.raises(ConfigError, match=r"soft-capped or scaled.*budget_measure='loss'"):
        t.train()


def test_output_layers_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    from peft import LoraConfig

    def made(model: Any, peft_config: Any = None) -> ROSUTrainer:
        return ROSUTrainer(
            model,
            config(tmp_path, budget=10.0, budget_measure="kl"),
            train_dataset=ForgetRetainDataset(FORGET, RETAIN),
            budget_dataset=KEPT,
            peft_config=peft_config,
        )

    with pytest.raises(ConfigError, match="CleanLM does not name one"):
        made(CleanLM())
    for options in ({"target_modules": ["lm_head"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}):
        with pytest.raises(ConfigError, match="an adapter on it"):
            made(tiny_llama(), LoraConfig(r=2, task_type="CAUSAL_LM", **options))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget_measure": "kl"}, "no effect without a budget"),
        ({"budget": 0.1, "budget_measure": "js"}, "budget_measure"),
        ({"budget": 0.0, "budget_measure": "kl"}, "how far KL may go"),
        ({"budget": float("nan"), "budget_measure": "kl"}, "exceeded from the start"),
    ],
)
def test_a_measure_that_cannot_work(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **settings)


def test_representation_level_has_no_answers_to_compare() -> None:
    with pytest.raises(ConfigError, match="representation level"):
        RepresentationArguments(budget=0.02, budget_measure="kl").check_method()
