"""Borrowed losses: OpenUnlearning's functions, called by name, with the sign and the counting of ours."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rosu_llm.errors import ConfigError, DataError
from rosu_llm.losses import LOSSES, LossContext
from rosu_llm.openunlearning.losses import register_losses
from tests.models import samples, tiny_llama
from tests.openunlearning.standin_run import build


def batch_of(data: SimpleNamespace, seed: int) -> dict[str, torch.Tensor]:
    rows = [{k: torch.tensor(v) for k, v in s.items()} for s in samples(3, seed)]
    result: dict[str, torch.Tensor] = data.pad(rows)
    return result


def context(model: torch.nn.Module, name: str) -> LossContext:
    return LossContext(options=LOSSES[name].options, reference_logits=lambda batch: model(**batch).logits)


def test_a_mean_to_minimise_becomes_a_sum_to_raise(checkout: SimpleNamespace) -> None:
    """Minus their value times the number of sequences or answer tokens, counted by hand."""
    import trainer.utils as theirs  # type: ignore[import-not-found]

    register_losses()
    model, batch, other = tiny_llama(1), batch_of(checkout.data, 3), batch_of(checkout.data, 4)
    tokens = sum(int((row[1:] != -100).sum()) for row in batch["labels"])
    for name, value, units in (
        ("wga", theirs.compute_wga_loss(model, batch, 1.0)[0], tokens),
        ("satimp", theirs.compute_satimp_loss(model, batch, 5.0, 1.0)[0], tokens),
        ("dpo", theirs.compute_dpo_loss(model, tiny_llama(2), other, batch, 0.1)[0], 3),
    ):
        reference = tiny_llama(2)
        mine = LOSSES[name].function(model, {**batch, "alternate": other}, context(reference, name))
        assert float(mine) == pytest.approx(-float(value) * units, rel=1e-6), name


def test_dpo_at_the_initial_model_and_its_direction(checkout: SimpleNamespace) -> None:
    """With policy = reference the margin is 0 and the objective (2/β) log 2 per sequence; raising L_f prefers the
    alternate answer."""
    register_losses()
    model, reference = tiny_llama(1), tiny_llama(1)
    batch = {**batch_of(checkout.data, 3), "alternate": batch_of(checkout.data, 4)}
    value = LOSSES["dpo"].function(model, batch, context(reference, "dpo"))
    assert float(value) == pytest.approx(-3 * 2 / 0.1 * math.log(2), rel=1e-6)
    value.backward()
    with torch.no_grad():
        for p in model.parameters():
            p += 1e-3 * p.grad

    def log_probability(part: dict[str, torch.Tensor]) -> float:
        return -float(model(**part).loss)

    fresh = tiny_llama(1)
    alternate = batch["alternate"]
    original = {k: v for k, v in batch.items() if k != "alternate"}
    assert log_probability(alternate) > -float(fresh(**alternate).loss)
    assert log_probability(original) < -float(fresh(**original).loss)


def test_dpo_needs_alternate_answers(checkout: SimpleNamespace, tmp_path: Path) -> None:
    trainer = build(checkout, tmp_path, "trainer=ROSU", "trainer.method_args.forget_loss=DPO")
    with pytest.raises(DataError, match="forget data has none: use experiment=unlearn/tofu/idk"):
        trainer.train()


@pytest.mark.parametrize("loss", ["NPO", "SimNPO", "IdkDPO", "WGA", "SatImp", "CEU", "UNDIAL"])
def test_every_loss_trains_on_data_with_alternates(checkout: SimpleNamespace, tmp_path: Path, loss: str) -> None:
    trainer = build(
        checkout,
        tmp_path,
        "trainer=ROSU",
        "data/datasets@data.forget=TOFU_QA_forget_idk",
        f"trainer.method_args.forget_loss={loss}",
        "trainer.args.max_steps=2",
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss/forget" in entry]
    assert len(entries) == 2
    assert all(math.isfinite(entry["loss/forget"]) and entry["norm/forget"] > 0 for entry in entries)


def test_a_loss_of_ours_is_not_replaced(checkout: SimpleNamespace) -> None:
    before = dict(LOSSES)
    register_losses()
    assert all(LOSSES[name] is spec for name, spec in before.items())


def test_a_checkout_without_the_function(checkout: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainer.utils as theirs

    register_losses()
    monkeypatch.delattr(theirs, "compute_dpo_loss")
    model, batch = tiny_llama(1), batch_of(checkout.data, 3)
    with pytest.raises(ConfigError, match=r"has no trainer.utils.compute_dpo_loss"):
        LOSSES["dpo"].function(model, {**batch, "alternate": batch}, context(model, "dpo"))
