"""A window cut by length holds the same samples, the same loss and the same gradient, with less padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rosu_llm import ForgetRetainDataset, ROSUConfig, ROSUTrainer
from rosu_llm.data.pairing import ForgetRetainCollator
from rosu_llm.errors import ConfigError, DataError
from rosu_llm.losses import COUNT, answer_nll
from rosu_llm.losses.language import POSITIONS
from rosu_llm.training.regroup import regroup
from tests.models import CleanLM, flat, samples, tiny_llama

DATA = samples(12, seed=3, shortest=4, longest=30)


def window(sizes: list[int] = [4, 1, 5, 2]) -> list[dict[str, Any]]:  # noqa: B006
    collate, start, batches = ForgetRetainCollator(0), 0, []
    for size in sizes:
        batches.append(collate(DATA[start : start + size]))
        start += size
    return batches


def rows(batches: list[Any]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Unpadded tokens and labels of every row."""
    found = []
    for batch in batches:
        for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
            keep = mask.bool()
            assert (labels[~keep] == -100).all()
            found.append((tuple(ids[keep].tolist()), tuple(labels[keep].tolist())))
    return sorted(found)


@pytest.mark.parametrize("tokens", [None, 30, 47, 200, 10_000])
def test_every_sample_is_there_once_and_no_micro_batch_is_larger(tokens: int | None) -> None:
    before = window()
    after = regroup({"forget": before}, tokens)["forget"]
    assert rows(after) == rows(before)
    limit = tokens or max(batch["input_ids"].numel() for batch in before)
    assert all(batch["input_ids"].numel() <= limit for batch in after)
    if tokens is None:
        assert sum(b["input_ids"].numel() for b in after) < sum(b["input_ids"].numel() for b in before)


@pytest.mark.parametrize("tokens", [None, 0, 40])
def test_answers_are_where_they_say(tokens: int | None) -> None:
    for batch in regroup({"forget": window()}, tokens)["forget"]:
        mask = batch["labels"][:, 1:] != -100
        wanted = mask.nonzero().t()
        assert torch.equal(torch.stack(batch[POSITIONS][:2]), wanted)
        plain = {key: value for key, value in batch.items() if key != POSITIONS}
        for unit in ("token", "sequence"):
            assert int(COUNT[unit](batch)) == int(COUNT[unit](plain))


def test_front_padding_and_a_predicted_end_stay() -> None:
    """Taking padding away in front would shift positions; an end-of-text token may be predicted but not attended to."""
    left = {
        "input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 2]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]),
        "labels": torch.tensor([[-100, -100, -100, 6], [-100, -100, 9, 2]]),
    }
    short = {key: value[:, :2] for key, value in left.items()}
    short = {**short, "labels": torch.full((2, 2), -100), "attention_mask": torch.ones(2, 2)}
    cut = regroup({"retain": [left, short]}, 8)["retain"]
    assert [b["input_ids"].tolist() for b in cut] == [left["input_ids"].tolist(), short["input_ids"].tolist()]


def test_other_tensors_go_with_their_samples() -> None:
    before = window()
    for i, batch in enumerate(before):
        batch["index"] = 100 * i + torch.arange(len(batch["input_ids"]))
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    known = {
        tuple(ids[: int(mask.sum())].tolist()): int(number)
        for batch in before
        for ids, mask, number in zip(batch["input_ids"], batch["attention_mask"], batch["index"], strict=True)
    }
    for batch in regroup({"forget": before}, 45)["forget"]:
        for ids, mask, number, places in zip(
            batch["input_ids"], batch["attention_mask"], batch["index"], batch["position_ids"], strict=True
        ):
            length = int(mask.sum())
            assert known[tuple(ids[:length].tolist())] == int(number)
            assert places[:length].tolist() == list(range(length))


@pytest.mark.parametrize("strange", [{"alternate": {"input_ids": torch.ones(4, 3)}}, {"scale": torch.tensor(1.0)}])
def test_parts_that_cannot_be_cut_stay_as_they_are(strange: dict[str, Any]) -> None:
    before = [{**window([4])[0], **strange}, window([4])[0]]
    assert regroup({"forget": before, "retain": window()}, 40)["forget"] == before


def weights(folder: Path, model: Any = None, **settings: Any) -> Tensor:
    """After three windows of ragged samples."""
    model = model or CleanLM(dropout=settings.pop("dropout", 0.0)).double()
    arguments = {"rho": 0.05, "learning_rate": 1e-2, "max_steps": 3, "per_device_train_batch_size": 2}
    config = ROSUConfig(
        str(folder), **{**arguments, "gradient_accumulation_steps": 3, "use_cpu": True, "report_to": [], **settings}
    )
    data = ForgetRetainDataset(DATA[:6], DATA[6:], seed=1)
    trainer = ROSUTrainer(model, config, train_dataset=data)
    trainer.train()
    return flat(model.parameters())


@pytest.mark.parametrize("tokens", [None, 31])
@pytest.mark.parametrize("loss", ["nll", "simnpo", "npo"])
def test_training_ends_with_the_same_weights(loss: str, tokens: int | None, tmp_path: Path) -> None:
    """float64: sums in another order."""
    plain = weights(tmp_path, forget_loss=loss, micro_batch_tokens=0, forget_until=4.0)
    cut = weights(tmp_path, forget_loss=loss, micro_batch_tokens=tokens, forget_until=4.0)
    start = flat(CleanLM().double().parameters())
    assert float((cut - plain).norm() / (plain - start).norm()) < 1e-9


def test_a_llama_ends_with_the_same_weights(tmp_path: Path) -> None:
    plain, cut = (weights(tmp_path, tiny_llama(), micro_batch_tokens=tokens) for tokens in (0, None))
    start = flat(tiny_llama().parameters())
    assert float((cut - plain).norm() / (plain - start).norm()) < 1e-5


@pytest.mark.parametrize("tokens", [None, 0])
def test_one_row_without_padding_gives_the_same_weights(tokens: int | None, tmp_path: Path) -> None:
    options = {"forget_loss": "npo", "forget_until": 4.0, "micro_batch_tokens": tokens}
    plain = weights(tmp_path, tiny_llama(), **options)
    seen: list[tuple[int, ...]] = []
    model = tiny_llama()
    model.register_forward_pre_hook(
        lambda m, given, named: seen.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    joined = weights(tmp_path, model, padding_free=True, **options)
    assert float((joined - plain).norm() / (plain - flat(tiny_llama().parameters())).norm()) < 1e-5
    assert sum(shape[0] == 1 and shape[1] > 30 for shape in seen) >= 9  # three passes of three windows


def test_a_cache_does_not_join_samples_and_trying_takes_as_many_passes_for_any_batch() -> None:
    """With ``use_cache`` SDPA builds no mask from position ids; under sharding every pass is a collective."""
    counts = []
    for rows in (1, 2):
        model = tiny_llama()
        model.config.use_cache = True
        passes: list[int] = []
        model.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        batch = regroup({"forget": window([rows])}, None, join=True)["forget"][0]
        plain = {key: value for key, value in batch.items() if key != POSITIONS}
        assert torch.allclose(answer_nll(model, batch), answer_nll(model, plain), atol=1e-5)
        counts.append(len(passes))
    assert counts[0] == counts[1]


def test_models_and_data_that_cannot_be_one_row_are_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    model.register_forward_pre_hook(  # an older transformers, which ignores where positions begin again
        lambda m, given, named: (given, {**named, "position_ids": None}), with_kwargs=True
    )
    with pytest.raises(ConfigError, match="see each other"):
        weights(tmp_path, model, padding_free=True)
    left = {
        "input_ids": torch.tensor([[0, 5, 6], [7, 8, 9]]),
        "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "labels": torch.tensor([[-100, -100, 6], [-100, 8, 9]]),
    }
    with pytest.raises(DataError, match="pad on the right"):
        regroup({"forget": [left]}, None, join=True)
    with pytest.raises(DataError, match="row per sample"):
        regroup({"forget": [{**left, "scale": torch.tensor(1.0)}]}, None, join=True)


def test_dropout_is_replayed_in_the_window_as_it_is_cut(tmp_path: Path) -> None:
    """At ρ → 0 the surrogate pass is the retain pass once more: equal losses show equal masks."""
    config = ROSUConfig(
        str(tmp_path), rho=1e-12, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=3,
        micro_batch_tokens=40, use_cpu=True, report_to=[], logging_steps=1,
    )  # fmt: skip
    data = ForgetRetainDataset(DATA[:6], DATA[6:], seed=1)
    trainer = ROSUTrainer(CleanLM(dropout=0.5).double(), config, train_dataset=data)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss/surrogate" in entry]
    assert len(logs) == 2
    for entry in logs:
        assert entry["loss/surrogate"] == pytest.approx(entry["loss/retain"], rel=1e-9)


def test_bad_budgets_are_refused(tmp_path: Path) -> None:
    longest = max(len(sample["input_ids"]) for sample in DATA)
    with pytest.raises(ConfigError, match=f"at least {longest}"):
        weights(tmp_path, micro_batch_tokens=longest - 1)
    with pytest.raises(ConfigError, match="window_tokens"):
        ROSUConfig(str(tmp_path), micro_batch_tokens=64, reduction="micro_mean")
    with pytest.raises(ConfigError, match="at least 1"):
        ROSUConfig(str(tmp_path), micro_batch_tokens=-1)
