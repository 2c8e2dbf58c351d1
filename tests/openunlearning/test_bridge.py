"""The call of ``load_trainer`` translated: settings, data, calibration, precision; one clear line for each mistake."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rosu_llm.errors import ConfigError, DataError
from rosu_llm.openunlearning.arguments import read_method_args
from rosu_llm.openunlearning.bridge import check_unseen
from rosu_llm.openunlearning.registration import TRAINERS, Deferred, offer, register, trainer_module
from tests.openunlearning.standin_run import build


def test_every_alias_is_registered_under_its_name_and_sets_its_method(
    checkout: SimpleNamespace, tmp_path: Path
) -> None:
    for name, alias in TRAINERS.items():
        layers = ["model=zephyr-7b-beta"] if name == "ROSURepresentation" else []
        trainer = build(checkout, tmp_path, f"trainer={name}", *layers)
        assert type(trainer).__name__ == name
        assert trainer.method_args.method == alias.method
    assert set(checkout.trainer.TRAINER_REGISTRY) == {"FinetuneTrainer", "Plain", *TRAINERS}


def test_registering_again_changes_nothing(checkout: SimpleNamespace) -> None:
    assert register() == list(TRAINERS)
    before = dict(checkout.trainer.TRAINER_REGISTRY)
    assert register() == list(TRAINERS)
    assert before == checkout.trainer.TRAINER_REGISTRY


def test_offered_names_become_classes_when_called(checkout: SimpleNamespace, tmp_path: Path) -> None:
    offer()
    assert isinstance(checkout.trainer.TRAINER_REGISTRY["UAM"], Deferred)
    assert not isinstance(checkout.trainer.TRAINER_REGISTRY["Plain"], Deferred)
    with pytest.raises(DataError, match="no training data"):
        checkout.trainer.TRAINER_REGISTRY["UAM"](train_dataset=None)
    assert isinstance(checkout.trainer.TRAINER_REGISTRY["UAM"], type)


def test_nothing_is_offered_outside_openunlearning(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "trainer", SimpleNamespace(TRAINER_REGISTRY={}))  # type: ignore[arg-type]
    offer()
    assert sys.modules["trainer"].TRAINER_REGISTRY == {}
    with pytest.raises(ConfigError, match=r"registry .* is not loaded"):
        trainer_module()


def test_a_taken_name_is_an_error_only_for_who_asks(checkout: SimpleNamespace) -> None:
    theirs = type("UAM", (checkout.trainer.Plain,), {})
    checkout.trainer._register_trainer(theirs)
    offer()
    assert "UAM" not in register(wanted="ROSU")
    assert checkout.trainer.TRAINER_REGISTRY["UAM"] is theirs
    with pytest.raises(ConfigError, match=r"already has .* 'UAM'.*use trainer=ROSU trainer.method_args.method=uam"):
        register(wanted="UAM")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+trainer.method_args.rhoo=1", r"Unknown method_args of trainer=ROSU 'rhoo'.*Did you mean 'rho'\?"),
        ("+trainer.method_args.gamma=1", "what other trainers call gamma is 'forget_weight' here"),
        ("trainer.method_args.rho=large", "rho='large' is not understood: give a positive number"),
        ("trainer.method_args.forget_loss=npoo", "Unknown forget_loss 'npoo'.*Did you mean 'npo'"),
        ("trainer.method_args.calibrate=holdout", "calibrate=holdout needs never-trained samples"),
        ("trainer.method_args.holdout_data=holdout10", "must be a data set as in configs/data/datasets"),
    ],
)
def test_bad_method_args_are_one_clear_line(
    checkout: SimpleNamespace, tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        build(checkout, tmp_path, "trainer=ROSU", override)
    assert "\n" not in str(caught.value)


def test_an_alias_stands_for_one_method_except_the_general_one(checkout: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trainer=UAM stands for method='uam', but method_args say 'ng'"):
        build(checkout, tmp_path, "trainer=UAM", "trainer.method_args.method=ng")
    assert build(checkout, tmp_path, "trainer=ROSU", "trainer.method_args.method=ng").method_args.method == "ng"


def test_losses_are_spelled_as_openunlearning_does(checkout: SimpleNamespace, tmp_path: Path) -> None:
    for given, ours in (("NPO", "npo"), ("SimNPO", "simnpo"), ("NLL", "nll"), ("IdkDPO", "dpo"), ("SatImp", "satimp")):
        trainer = build(checkout, tmp_path, "trainer=ROSU", f"trainer.method_args.forget_loss={given}")
        assert trainer.method_args.forget_loss == ours


def test_data_without_a_retain_part(checkout: SimpleNamespace, tmp_path: Path) -> None:
    """An empty mapping is what upstream makes of ``data.retain={}``; plain data is what ``mode: train`` gives."""
    trainer = build(checkout, tmp_path, "trainer=ROSU")
    trainer.train_dataset.retain = {}
    common = {"args": trainer.args, "data_collator": checkout.data.pad}
    with pytest.raises(DataError, match=r"no retain part .*samples hold forget.*data/datasets@data.retain"):
        type(trainer)(model=trainer.model, train_dataset=trainer.train_dataset, **common)
    with pytest.raises(DataError, match=r"no forget part .*--config-name=unlearn.yaml"):
        type(trainer)(model=trainer.model, train_dataset=trainer.train_dataset.forget, **common)


def test_looking_at_the_data_draws_no_random_number(checkout: SimpleNamespace, tmp_path: Path) -> None:
    from rosu_llm.openunlearning.bridge import check_parts

    trainer = build(checkout, tmp_path, "trainer=ROSU")
    state = torch.get_rng_state()
    check_parts(trainer.train_dataset)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["LLMU", "SCRUB", "SSD"])
def test_methods_with_data_or_epochs_of_their_own_train(name: str, checkout: SimpleNamespace, tmp_path: Path) -> None:
    """LLMU's wrong answers are those of the retain samples beside the questions."""
    own = ["trainer.args.max_steps=2"] + (["trainer.method_args.ssd_alpha=1"] if name == "SSD" else [])
    if name == "SCRUB":  # whose second epoch forgets
        own = ["trainer.args.max_steps=-1", "trainer.args.num_train_epochs=2", "trainer.args.logging_steps=1"]
    trainer = build(checkout, tmp_path, f"trainer={name}", *own)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert any(not torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True))
    assert ("loss/mismatch" in trainer.state.log_history[0]) == (name == "LLMU")
    assert any("loss/forget" in entry for entry in trainer.state.log_history)


def test_calibration_reads_held_out_data_through_openunlearning(checkout: SimpleNamespace, tmp_path: Path) -> None:
    words = ("experiment=unlearn/tofu/rosu_recommended", "trainer.method_args.calibrate=holdout")
    trainer = build(checkout, tmp_path, *words, "trainer.args.max_steps=1")
    assert len(trainer._holdout) == 20
    trainer.train()
    (entry,) = (e for e in trainer.state.log_history if "loss/holdout" in e)
    with torch.no_grad():  # the same mean, one row at a time, under the weights before the step
        fresh = build(checkout, tmp_path, "trainer=ROSU").model
        total = count = 0.0
        for row in trainer._holdout.rows:
            logits = fresh(row["input_ids"][None]).logits[0, :-1].double()
            total -= float(logits.log_softmax(-1).gather(-1, row["input_ids"][1:, None])[2:].sum())
            count += len(row["input_ids"]) - 3
    assert entry["loss/holdout"] == pytest.approx(total / count, rel=1e-5)


def test_bf16_weights_are_upcast_with_a_warning_unless_declined(
    checkout: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = build(checkout, tmp_path, "trainer=ROSU", "dtype=bfloat16", "trainer.args.max_steps=1")
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert "Trainable weights were bfloat16 and are now float32" in caplog.text
    trainer.train()
    assert any("perturb/realized" in entry for entry in trainer.state.log_history)
    kept = build(checkout, tmp_path, "trainer=ROSU", "dtype=bfloat16", "trainer.method_args.upcast=false")
    assert {p.dtype for p in kept.model.parameters()} == {torch.bfloat16}


def test_representation_level_trains_three_matrices_of_the_model_it_is_given(
    checkout: SimpleNamespace, tmp_path: Path
) -> None:
    """The experiment as shipped, two steps; the weights are those of RepresentationTrainer on the same batches."""
    from rosu_llm import RepresentationConfig, RepresentationTrainer

    short = ("trainer.args.max_steps=2", "trainer.args.gradient_accumulation_steps=2", "trainer.args.eval_strategy=no")
    inside = build(checkout, tmp_path / "in", "experiment=unlearn/wmdp/rosu", *short)
    alone_model = build(checkout, tmp_path / "fresh", "experiment=unlearn/wmdp/rosu", *short)
    before = {n: p.detach().clone() for n, p in alone_model.model.named_parameters()}
    settings = {
        k: getattr(inside.args, k) for k in ("learning_rate", "weight_decay", "lr_scheduler_type", "seed", "optim")
    }
    alone = RepresentationTrainer(
        alone_model.model,
        RepresentationConfig(
            output_dir=str(tmp_path / "alone"),
            max_steps=2,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            amplify="optimizer",
            use_cpu=True,
            report_to=[],
            **settings,
        ),
        train_dataset=alone_model.train_dataset,
        data_collator=checkout.data.pad,
    )
    for trainer in (inside, alone):
        torch.manual_seed(7)
        trainer.train()
    moved = {n for n, p in inside.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {f"model.layers.{i}.mlp.down_proj.weight" for i in (5, 6, 7)}
    theirs = dict(alone.model.named_parameters())
    assert all(torch.equal(p, theirs[n]) for n, p in inside.model.named_parameters())


def test_settings_of_rmu_are_explained_at_representation_level(checkout: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="what other trainers call steering_coeff is 'steering' here"):
        build(
            checkout,
            tmp_path,
            "trainer=ROSURepresentation",
            "model=zephyr-7b-beta",
            "+trainer.method_args.steering_coeff=2",
        )


def test_resuming_through_the_arguments(
    checkout: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenUnlearning calls ``train()`` bare; stopped after two of four steps, the optimizer then makes two more.

    The weights are not those of an uninterrupted run: retain partners are drawn anew (see ``data``).
    """
    saving = ("trainer=ROSU", "trainer.args.save_strategy=epoch", "trainer.args.save_only_model=false")
    auto = "trainer.args.resume_from_checkpoint=auto"
    build(checkout, tmp_path, *saving, "trainer.args.max_steps=2", auto).train()  # from the beginning
    with caplog.at_level(logging.INFO):
        rest = build(checkout, tmp_path, *saving, "trainer.args.max_steps=4", auto)
    assert f"resume_from_checkpoint=auto: from {tmp_path / 'checkpoint-2'}" in caplog.text
    assert "holds a model already" not in caplog.text
    rest.train()
    steps = {float(state["step"]) for state in rest.raw_optimizer().state.values()}
    assert steps == {4.0} and rest.state.global_step == 4
    assert [entry["step"] for entry in rest.state.log_history if "loss/forget" in entry] == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint='.*nowhere' is not a folder"):
        build(checkout, tmp_path, *saving, f"trainer.args.resume_from_checkpoint={tmp_path / 'nowhere'}")


def test_a_folder_with_a_model_is_not_replaced_silently(
    checkout: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build(checkout, tmp_path, "trainer=ROSU", "trainer.args.max_steps=1")
    assert "holds a model already" not in caplog.text
    trainer.save_model(str(tmp_path))
    build(checkout, tmp_path, "trainer=ROSU_matched")
    assert f"{tmp_path} holds a model already" in caplog.text
    caplog.clear()
    build(checkout, tmp_path / "other", "trainer=ROSU", "trainer.args.resume_from_checkpoint=auto")
    assert "will save no checkpoint to resume from" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"forget_until": "holdout"}, "forget_until=holdout needs never-trained samples"),
        ({"forget_until": "base"}, "forget_until=base needs a model or answers"),
        ({"budget": 0.1}, "budget=0.1 needs data"),
    ],
)
def test_settings_that_measure_on_data_which_is_not_there(settings: dict[str, Any], message: str) -> None:
    arguments = read_method_args("ROSU", settings)
    with pytest.raises(ConfigError, match=message):
        check_unseen(arguments, None)
