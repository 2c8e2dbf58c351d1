"""``RepresentationTrainer`` around the step: checkpoints, evaluation, corpora in turn, saving, refusals."""

from __future__ import annotations

import copy
import hashlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainingArguments

from rosu_llm import ForgetRetainDataset, ROSUConfig, ROSUTrainer
from rosu_llm.compat import dtype_argument
from rosu_llm.data.corpus import AlternatingCorpora
from rosu_llm.errors import ConfigError, DataError
from rosu_llm.representation.config import RepresentationArguments, RepresentationConfig
from rosu_llm.representation.losses import bootstrap_noise
from rosu_llm.representation.trainer import RepresentationTrainer
from rosu_llm.training.checkpoints import THETA_FILE
from tests.models import samples, tiny_decoder
from tests.representation.naive import Naive
from tests.representation.running import (
    Collator,
    Pairs,
    Recorder,
    build,
    configuration,
    documents,
    parameter_names,
    relative,
    train,
)

ADAM: dict[str, Any] = {"optim": "adamw_torch", "amplify": "auto", "learning_rate": 1e-2, "noise_std": 0.3}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_decoder().save_pretrained(tmp_path / "original", max_shard_size="20KB")
    return tmp_path / "original"


def corpora(*sizes: int) -> list[list[dict[str, Any]]]:
    return [
        [{"input_ids": ids, "corpus": number} for ids in documents(size, 10 + number)]
        for number, size in enumerate(sizes)
    ]


# -- checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["fast", "plain"])
def test_resuming_reproduces_the_uninterrupted_run(tmp_path: Path, checkpoint: Path, path: str) -> None:
    """AdamW with the matched pull; over an epoch's end, so that the second epoch's documents must come back too."""

    def go(folder: str, resume: str | None = None, **settings: Any) -> Recorder:
        data = AlternatingCorpora(corpora(5, 4), documents_as_rows(6), window=4, seed=3)
        trainer = build(
            str(checkpoint), tmp_path / folder, path=path,
            options={"train_dataset": data, "data_collator": Collator2()},
            **{**ADAM, "max_steps": 7, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, **settings},
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = go("whole", save_strategy="steps", save_steps=3)
    saved = tmp_path / "whole" / "checkpoint-3"
    assert set(load_file(saved / THETA_FILE)) == set(whole._theta)
    assert not list(saved.glob("model*.safetensors"))  # three matrices, not a model
    again = go("again", str(saved))
    assert len(again.outcomes) == 4
    assert torch.equal(again.theta(), whole.theta())
    assert [o.losses for o in again.outcomes] == [o.losses for o in whole.outcomes[3:]]


def documents_as_rows(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": ids, "corpus": 0} for ids in documents(count, 20)]


class Collator2(Collator):
    """For items whose retain part is a list, as the corpora give them."""

    def __call__(self, items: Any) -> dict[str, Any]:
        return {
            "forget": self._pad([item["forget"] for item in items]),
            "retain": self._pad([kept for item in items for kept in item["retain"]]),
        }


def test_resuming_with_other_parameters_is_refused(tmp_path: Path) -> None:
    train(tiny_decoder(), tmp_path / "a", save_strategy="steps", save_steps=1)
    saved = str(tmp_path / "a" / "checkpoint-1")
    other = build(
        tiny_decoder(), tmp_path / "b", trainable_parameters=r"layers\.2\.mlp\.down_proj\.weight$", max_steps=2
    )
    with pytest.raises(ConfigError, match="resume with the trainable_parameters it was started with"):
        other.train(resume_from_checkpoint=saved)
    (tmp_path / "a" / "checkpoint-1" / THETA_FILE).rename(tmp_path / "a" / "checkpoint-1" / "model.safetensors")
    with pytest.raises(ConfigError, match=f"holds no {THETA_FILE}"):
        build(tiny_decoder(), tmp_path / "c", max_steps=2).train(resume_from_checkpoint=saved)


def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path: Path) -> None:
    """The retain loss only grows here, so the first checkpoint is the best."""
    data = Pairs(documents(4, 1), documents(4, 2), 4)
    trainer = train(
        tiny_decoder(), tmp_path, options={"eval_dataset": data}, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True,
        metric_for_best_model="eval_loss", max_steps=3, noise_std=0.3,
    )  # fmt: skip
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[0] == min(losses) < losses[-1]
    assert torch.equal(trainer.theta(), trainer.path_of_theta[1])


# -- evaluation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["fast", "plain"])
@pytest.mark.parametrize("reduction", ["token_mean", "paper"])
def test_paired_evaluation_reports_both_distances(tmp_path: Path, reduction: str, path: str) -> None:
    model = tiny_decoder()
    forget, retain = documents(4, 7), documents(4, 8)
    trainer = build(
        copy.deepcopy(model), tmp_path, path=path, reduction=reduction, noise_std=0.3, learning_rate=0.05, max_steps=2,
        options={"eval_dataset": Pairs(forget, retain, 4)},
    )  # fmt: skip
    sigma = bootstrap_noise(trainer.args.seed, 0, 0.3, "hidden")(torch.zeros(1, 32)).double()
    first = trainer.evaluate()
    assert first["eval_loss"] == 0.0
    lengths = sum(map(len, forget)) / 4 if reduction == "paper" else 1.0
    assert first["eval_forget_loss"] == pytest.approx(0.5 * float(sigma @ sigma) * lengths, rel=1e-6)
    trainer.train()
    naive = Naive(model, "model.layers.2", parameter_names(), reduction)
    naive.assign(trainer.theta())
    sigma = bootstrap_noise(trainer.args.seed, 2, 0.3, "hidden")(torch.zeros(1, 32)).double()
    later = trainer.evaluate()
    assert later["eval_loss"] == pytest.approx(naive.distance(retain).item(), rel=1e-5)
    assert later["eval_forget_loss"] == pytest.approx(naive.distance(forget, lambda *_: sigma).item(), rel=1e-5)
    assert not trainer._prepared


def test_plain_evaluation_batches_are_refused_clearly(tmp_path: Path, checkpoint: Path) -> None:
    class Plain(Collator):
        def __call__(self, items: Any) -> dict[str, Any]:
            if "forget" in items[0]:
                return super().__call__(items)
            return dict(self._pad(items))

    rows = documents_as_rows(4)
    trainer = build(str(checkpoint), tmp_path / "x", options={"eval_dataset": rows, "data_collator": Plain()})
    with pytest.raises(DataError, match="forget"):
        trainer.evaluate()


# -- corpora ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_window_forgets_from_one_corpus_in_turn(tmp_path: Path, accumulation: int) -> None:
    """Without a collator given: the trainer brings the one that goes with corpora."""
    data = AlternatingCorpora(corpora(9, 5, 3), documents_as_rows(4), window=2 * accumulation)
    trainer = Recorder(
        tiny_decoder(),
        configuration(
            tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, max_steps=6, seed=5
        ),
        train_dataset=data,
    )
    trainer.train()
    seen = [[batch["forget"]["corpus"].tolist() for batch in window] for window in trainer.windows]
    assert seen == [[[turn] * 2] * accumulation for turn in (0, 1, 2, 0, 1, 2)]


def test_corpora_for_another_window_are_refused(tmp_path: Path) -> None:
    data = AlternatingCorpora(corpora(4), documents_as_rows(4), window=4)
    with pytest.raises(DataError, match=r"alternate every 4 samples, but one step takes 8 .*window=8"):
        Recorder(tiny_decoder(), configuration(tmp_path, gradient_accumulation_steps=2), train_dataset=data)


def test_ordinary_pairs_work_too(tmp_path: Path) -> None:
    trainer = RepresentationTrainer(
        tiny_decoder(),
        configuration(tmp_path, max_steps=3, noise_std=0.3),
        train_dataset=ForgetRetainDataset(samples(8, seed=1), samples(9, seed=2)),
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss/retain" in entry]
    assert logs[0]["loss/retain"] == 0.0 < logs[1]["loss/retain"]


# -- saving -----------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir()) if p.is_file()}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_the_saved_copy_is_the_trained_model(tmp_path: Path, stored: torch.dtype) -> None:
    source = tmp_path / "original"
    tiny_decoder(dtype=stored).save_pretrained(source)
    before = contents(source)
    trainer = train(str(source), tmp_path / "out", noise_std=0.3, max_steps=3)
    trainer.check_destination()
    trainer.save_model()
    assert contents(source) == before
    old, new = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name in old if not torch.equal(old[name], new[name])} == set(parameter_names())
    assert {tensor.dtype for tensor in new.values()} == {stored}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **dtype_argument(torch.float32))
    named = dict(loaded.named_parameters())
    theta = torch.cat([named[name].detach().double().reshape(-1) for name in parameter_names()])
    assert torch.equal(theta, trainer.theta().to(stored).double())
    # and it computes what the trainer computed
    forget = documents(3, 1)
    naive = Naive(loaded, "model.layers.2", parameter_names())
    naive.original = AutoModelForCausalLM.from_pretrained(source, **dtype_argument(torch.float32)).eval()
    with torch.no_grad():
        far = float(naive.distance(forget))
    batch = Collator()._pad([{"input_ids": ids} for ids in forget])
    mine = float(trainer.compute_loss(trainer.model, {"retain": batch}).detach())
    assert far == pytest.approx(mine, rel=1e-5 if stored == torch.float32 else 0.05)  # rounding of the update


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["fast", "plain"])
def test_a_model_in_memory_is_saved_whole_in_its_own_types(tmp_path: Path, stored: torch.dtype, path: str) -> None:
    model = tiny_decoder(dtype=stored)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = train(model, tmp_path / "out", noise_std=0.3, max_steps=3, path=path)
    trainer.save_model()
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {stored}
    assert {name for name in after if not torch.equal(after[name], before[name])} == set(parameter_names())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **dtype_argument(torch.float32))
    assert len(loaded.model.layers) == 4


def test_an_update_that_rounds_away_is_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, checkpoint: Path
) -> None:
    tiny_decoder(dtype=torch.bfloat16).save_pretrained(tmp_path / "low")
    with caplog.at_level(logging.INFO, logger="rosu_llm"):
        train(str(checkpoint), tmp_path / "a", learning_rate=1e-6).save_model()
        assert "2 tensors replaced; 100.0 % of the update survives rounding" in caplog.text
        train(str(tmp_path / "low"), tmp_path / "b", learning_rate=1e-6).save_model()
    assert "of the trained update survives" in caplog.text and "higher learning_rate" in caplog.text


def test_destinations_are_checked_before_training(tmp_path: Path, checkpoint: Path) -> None:
    build(str(checkpoint), tmp_path / "new").check_destination()
    with pytest.raises(ConfigError, match="already holds a model"):
        build(str(checkpoint), checkpoint).check_destination()
    with pytest.raises(ConfigError, match="is the original model"):
        build(str(checkpoint), checkpoint).check_destination(overwrite=True)
    with pytest.raises(ConfigError, match="already holds a model"):
        build(tiny_decoder(), checkpoint).check_destination()


def test_the_model_card_names_layer_and_parameters(tmp_path: Path, checkpoint: Path) -> None:
    trainer = train(str(checkpoint), tmp_path / "out")
    trainer.create_model_card()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "target_layer" in card and "trainable_parameters" in card and "noise_std" in card


# -- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reduction": "window_tokens"}, "reduction 'window_tokens': it is not one of paper, rmu, token_mean"),
        ({"noise_shape": "tokens"}, "Did you mean 'token'"),
        ({"path": "quick"}, "path 'quick'"),
        ({"target_layer": -1}, "target_layer=-1 must be 0 or more"),
        ({"trainable_parameters": "("}, "not a regular expression"),
        ({"noise_std": -0.1}, "noise_std=-0.1"),
        ({"noise_std": float("nan")}, "noise_std=nan"),
        ({"steering": float("inf")}, "steering=inf"),
        ({"noise_std": 0.0}, "no step is ever taken. Use the paper's 0.01"),
        ({"noise_std": 0.0, "method": "graddiff"}, "no step is ever taken. Use the paper's 0.01"),
        ({"method": "ft"}, "method='ft' takes the retain loss alone.*Use a method with a forget loss"),
        ({"forget_loss": "nll"}, "the two cannot be mixed. Set both to representation"),
        ({"retain_loss": "kl"}, "the two cannot be mixed"),
        ({"retain_loss": "rmu"}, "cannot work as a retain loss"),
        ({"calibrate": "holdout"}, "set calibrate='off'"),
        ({"calibrate": 2.5}, "set calibrate='off'"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing=True saves nothing here"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        configuration(tmp_path, **settings)
    assert "\n" not in str(caught.value)


def test_what_a_trainer_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pass args=RepresentationConfig"):
        RepresentationTrainer(tiny_decoder(), ROSUConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[]))
    with pytest.raises(ConfigError, match="needs model="):
        RepresentationTrainer(None, configuration(tmp_path))
    with pytest.raises(ConfigError, match="takes no adapter"):
        RepresentationTrainer(tiny_decoder(), configuration(tmp_path), peft_config=object())
    with pytest.raises(ConfigError, match="which has 4"):
        build(tiny_decoder(), tmp_path, target_layer=4)
    with pytest.raises(ConfigError, match="layer 2, above target_layer=1"):
        build(tiny_decoder(), tmp_path, target_layer=1)


def test_the_losses_need_this_trainer(tmp_path: Path) -> None:
    config = ROSUConfig(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], forget_loss="representation",
        retain_loss="representation", save_strategy="no", max_steps=1, disable_tqdm=True,
    )  # fmt: skip
    data = ForgetRetainDataset(samples(8, seed=1), samples(8, seed=2))
    with pytest.raises(ConfigError, match="use RepresentationTrainer"):
        ROSUTrainer(tiny_decoder(), config, train_dataset=data).train()


def test_method_arguments_beside_plain_training_arguments(tmp_path: Path) -> None:
    own = configuration(tmp_path, noise_std=0.3)
    chosen = {name: getattr(own, name) for name in RepresentationArguments.__dataclass_fields__}
    plain = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=4, max_steps=2, learning_rate=0.1,
        optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, report_to=[], save_strategy="no",
        disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    data = Pairs(documents(8, 1), documents(8, 2), 4)
    options: dict[str, Any] = {"train_dataset": data, "data_collator": Collator()}
    trainer = Recorder(tiny_decoder(), plain, method_args=RepresentationArguments(**chosen), **options)
    trainer.train()
    own.max_steps = 2
    same = Recorder(tiny_decoder(), own, **options)
    same.train()
    assert torch.equal(trainer.theta(), same.theta())
    assert relative(same.theta(), same.path_of_theta[0]) > 0.0


def test_defaults_are_the_papers() -> None:
    given = RepresentationConfig()
    assert (given.target_layer, given.noise_std, given.noise_shape, given.reduction) == (
        7,
        0.01,
        "hidden",
        "token_mean",
    )
    assert given.trainable_parameters == r"layers\.(5|6|7)\.mlp\.down_proj\.weight$"
    assert (given.path, given.mask_padding, given.steering) == ("fast", True, 6.5)
