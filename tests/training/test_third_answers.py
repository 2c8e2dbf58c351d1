"""Forget losses with a third answer, distillation and token weights inside the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rosu_llm import ForgetRetainCollator, ForgetRetainDataset, ROSUTrainer, WithAlternates
from rosu_llm.errors import ConfigError, DataError, UnsupportedLayoutError
from rosu_llm.losses import ReferenceModel
from rosu_llm.losses.language import alternate_of
from rosu_llm.training.config import MethodArguments
from rosu_llm.training.references import References
from tests.models import CleanLM, flat, samples, tiny_llama
from tests.training.test_trainer import FORGET, RETAIN, config, logs
from tests.training.test_trainer_step import Pairs, train

OTHERS = samples(16, seed=7)
#: Two for each sample, one per epoch.
THIRD = [(OTHERS[2 * i], OTHERS[2 * i + 1]) for i in range(8)]
NAMES = ("idk_nll", "idk_dpo", "altpo", "undial", "wga", "satimp", "odds")


def trainer(folder: Path, model: Any = None, peft_config: Any = None, **settings: Any) -> ROSUTrainer:
    return ROSUTrainer(
        tiny_llama() if model is None else model,
        config(folder, **settings),
        train_dataset=ForgetRetainDataset(WithAlternates(FORGET, THIRD), RETAIN),
        peft_config=peft_config,
    )


def adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.mark.parametrize("method", ["rosu", "graddiff"])
@pytest.mark.parametrize("forget_loss", NAMES)
def test_eight_times_one_equals_one_times_eight(tmp_path: Path, method: str, forget_loss: str) -> None:
    """Ragged answers beside ragged alternates: accumulation is only a way to cut the window."""
    results = []
    for batch, accumulation in ((8, 1), (1, 8)):
        model = CleanLM().double()
        train(
            model, tmp_path, method=method, forget_loss=forget_loss, pairs=Pairs(WithAlternates(FORGET, THIRD), RETAIN),
            per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        results.append(flat(model.parameters()))
    size = float((results[0] - flat(CleanLM().double().parameters())).norm())
    assert size > 1e-3
    # float64; reference log-probabilities are looked up as float32
    assert float((results[1] - results[0]).norm()) / size < (1e-6 if "po" in forget_loss else 1e-12)


@pytest.mark.parametrize("forget_loss", ["altpo", "undial"])
def test_resuming_reproduces_the_uninterrupted_run(tmp_path: Path, forget_loss: str) -> None:
    """To the bit; the second epoch, in which samples have their second alternate, begins after the checkpoint."""
    settings = {"forget_loss": forget_loss, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = trainer(tmp_path / "whole", **settings)
    whole.train()
    again = trainer(tmp_path / "whole", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert torch.equal(flat(again.model.parameters()), flat(whole.model.parameters()))


def test_every_epoch_has_its_own_third_answer() -> None:
    pairs = ForgetRetainDataset(WithAlternates(FORGET, THIRD), RETAIN)
    seen = []
    for epoch in range(3):
        pairs.set_epoch(epoch)
        batch = ForgetRetainCollator(0)([pairs[i] for i in range(8)])["forget"]
        seen.append([row[row != 0].tolist() for row in batch["alternate"]["input_ids"]])
        assert batch["alternate"]["labels"].shape == batch["alternate"]["input_ids"].shape
    assert seen[0] == [own[0]["input_ids"] for own in THIRD]
    assert seen[1] == [own[1]["input_ids"] for own in THIRD]
    assert seen[2] == seen[0]


@pytest.mark.parametrize("forget_loss", NAMES)
def test_adapters_train_with_every_loss(tmp_path: Path, forget_loss: str) -> None:
    t = trainer(tmp_path, peft_config=adapter(), forget_loss=forget_loss, max_steps=3, learning_rate=0.05)
    t.train()
    first, last = logs(t)[0], logs(t)[-1]
    assert first["norm/forget"] > 0.0
    assert last["norm/forget"] > 0.0
    if "po" in forget_loss:  # every margin is zero at the start, and none after it
        assert first["loss/forget"] == pytest.approx(-2.0 / 0.1 * 0.6931472, rel=1e-6)
        assert last["loss/forget"] != pytest.approx(first["loss/forget"], rel=1e-6)


def test_distillation_from_hidden_states_is_that_from_a_frozen_copy(tmp_path: Path) -> None:
    """Both losses compare with the initial model, and share what is kept of it."""
    runs = []
    for copied in (False, True):
        t = trainer(tmp_path, forget_loss="undial", retain_loss="kl", optim="sgd", learning_rate=0.1)
        start = flat(t.model.parameters())
        assert t._references.states is not None
        if copied:
            t._references.states, t._references.model = None, ReferenceModel(t.model)
        t.train()
        runs.append(flat(t.model.parameters()))
    assert float((runs[0] - runs[1]).norm() / (runs[1] - start).norm()) < 1e-4  # float32 through four steps


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("forget_loss", ["undial", "altpo", "wga", "odds"])
def test_bounded_forgetting_looks_at_the_answer_under_the_current_weights(
    tmp_path: Path, forget_loss: str, adapted: bool
) -> None:
    """Not at the alternates, and not at the pass of the initial model, which under LoRA is the same module."""
    given = {"forget_loss": forget_loss, "forget_until": 50.0, "max_steps": 3, "learning_rate": 0.05, "rho": 0.05}
    given |= {"per_device_train_batch_size": 8}
    t = trainer(tmp_path, peft_config=adapter() if adapted else None, **given)
    t.train()
    batch = ForgetRetainCollator(0)(FORGET)
    before = tiny_llama().eval()
    with torch.no_grad():
        logits = before(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        nll = torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], ignore_index=-100, reduction="none"
        )
    expected = float((nll.sum(-1) / (batch["labels"][:, 1:] != -100).sum(-1)).mean())
    assert logs(t)[0]["depth/loss"] == pytest.approx(expected, rel=1e-5)
    assert abs(logs(t)[-1]["depth/loss"] - expected) > 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"forget_loss": "npo", "undial_beta": 3.0}, "undial_beta=3.0 is an option of forget_loss 'undial'.*'npo'"),
        ({"dpo_beta": 0.5}, "dpo_beta=0.5 is an option of forget_loss 'idk_dpo' and 'altpo'"),
        ({"npo_beta": 0.5}, "npo_beta=0.5 is an option of forget_loss 'npo'"),
        ({"forget_loss": "altpo", "dpo_beta": 0.0}, "dpo_beta=0.0 must be positive"),
        ({"forget_loss": "satimp", "satimp_beta2": -1.0}, "satimp_beta2=-1.0 must be finite and not negative"),
        ({"forget_loss": "idk_nll", "forget_until": 3.0}, "that of the refusals alone.*idk_dpo"),
        ({"forget_loss": "altpo", "forget_until": 3.0, "forget_level": "token"}, "two whole answers.*'sequence'"),
        ({"forget_loss": "altpo", "forget_until": 3.0, "forget_level": "both"}, "two whole answers.*'sequence'"),
        ({"retain_loss": "undial"}, "cannot work as a retain loss"),
    ],
)
def test_settings_that_cannot_work_say_so(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MethodArguments(**settings).check_method()


def test_alternates_that_are_the_answer_or_missing_are_refused() -> None:
    with pytest.raises(DataError, match="alternate answer of forget sample 3 is its own answer"):
        WithAlternates(FORGET, [*THIRD[:2], (THIRD[2][0], FORGET[2]), *THIRD[3:]])
    with pytest.raises(DataError, match="8 forget samples have 7 lists"):
        WithAlternates(FORGET, [*THIRD[:7], ()])


def test_data_without_third_answers_is_refused(tmp_path: Path) -> None:
    given = config(tmp_path, forget_loss="idk_nll")
    with pytest.raises(DataError, match="no 'alternate'"):
        ROSUTrainer(tiny_llama(), given, train_dataset=ForgetRetainDataset(FORGET, RETAIN))
    unknown = Pairs(FORGET, RETAIN)  # known when its first batch comes
    with pytest.raises(DataError, match="no 'alternate'"):
        ROSUTrainer(tiny_llama(), given, train_dataset=unknown, data_collator=ForgetRetainCollator(0)).train()


def test_sharding_says_what_to_use_where_a_second_model_would_be_kept(tmp_path: Path) -> None:
    settings = config(tmp_path, forget_loss="undial")
    assert References(settings, tiny_llama(), "zero", listed=("forget",)).states is not None
    with pytest.raises(
        UnsupportedLayoutError, match=r"forget_loss='undial' would keep.*'idk_dpo' and 'altpo' keep one"
    ):
        References(settings, tiny_llama(), "zero")


def test_a_token_budget_counts_both_answers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="micro_batch_tokens=20 is less than the longest sample has, 28"):
        trainer(tmp_path, forget_loss="altpo", micro_batch_tokens=20)


def test_a_token_budget_counts_the_third_answers_of_every_epoch(tmp_path: Path) -> None:
    """The long one belongs to the second epoch."""
    (long,) = samples(1, seed=9, shortest=40, longest=40)
    data = ForgetRetainDataset(WithAlternates(FORGET, [*THIRD[:7], (THIRD[7][0], long)]), RETAIN)
    with pytest.raises(ConfigError, match="micro_batch_tokens=79 is less than the longest sample has, 80"):
        ROSUTrainer(tiny_llama(), config(tmp_path, forget_loss="altpo", micro_batch_tokens=79), train_dataset=data)
    ROSUTrainer(tiny_llama(), config(tmp_path, forget_loss="altpo", micro_batch_tokens=80), train_dataset=data)


def test_answers_may_be_tensors(tmp_path: Path) -> None:
    """A sample's are as long as they are, whatever the length of the third; of batches the rows are compared."""

    def tensors(sample: Any) -> Any:
        return {name: torch.tensor(value) for name, value in sample.items()}

    forget, third = [tensors(s) for s in FORGET], [tuple(map(tensors, own)) for own in THIRD]
    assert len(forget[0]["input_ids"]) != len(third[0][0]["input_ids"])
    ends = []
    for data in (WithAlternates(forget, third), WithAlternates(FORGET, THIRD)):
        given = config(tmp_path, forget_loss="altpo", max_steps=2)
        t = ROSUTrainer(tiny_llama(), given, train_dataset=ForgetRetainDataset(data, RETAIN))
        t.train()
        ends.append(flat(t.model.parameters()))
    assert torch.equal(*ends)
    with pytest.raises(DataError, match="2 answers and 3 alternate ones"):
        alternate_of({"input_ids": torch.ones(2, 4), "alternate": {"input_ids": torch.ones(3, 4)}})
