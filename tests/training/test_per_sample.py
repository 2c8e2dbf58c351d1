"""Per-sample retain gradients through the trainer, against a naive loop over single samples in float64."""

from __future__ import annotations

import copy
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rosu_llm import ForgetRetainCollator, ROSUConfig
from rosu_llm.errors import ConfigError, DataError, NonFiniteError
from rosu_llm.geometry import build_rule
from rosu_llm.step import UnlearningStep
from rosu_llm.training.per_sample import choose, single
from rosu_llm.training.preflight import preflight
from rosu_llm.training.ranks import Ranks
from tests.algorithm1 import Flat, mean_nll
from tests.models import CleanLM, flat, samples
from tests.training.test_trainer_step import FORGET, RETAIN, Pairs, train

ETA, RHO = 0.1, 0.3


class Naive:
    """The window's gradients at w, one sample at a time and without padding."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.space = model, Flat(model)
        self.w = self.space.vector()
        self.f, self.r = self.gradient(FORGET), self.gradient(RETAIN)
        self.single = [self.gradient([x]) for x in RETAIN]

    def gradient(self, items: Any, at: Tensor | None = None) -> Tensor:
        return self.space.gradient(lambda weights: mean_nll(self.model, weights, items), self.w if at is None else at)

    def basis(self, chosen: Any, mean: bool = False) -> Tensor:
        columns = [self.single[i] for i in chosen] + ([self.r] if mean else [])
        q: Tensor = torch.linalg.qr(torch.stack(columns, 1))[0]
        return q

    def rosu(self, chosen: Any, mean: bool = False) -> Tensor:
        """w + βδ − ηv with the tied β = η/ρ."""
        basis = self.basis(chosen, mean)
        without = lambda x: x - basis @ (basis.T @ x)
        q = without(self.f)
        u = q / q.norm()
        s = self.gradient(RETAIN, self.w + RHO * u)
        v = s + RHO / q.norm() * (without(s) - (u @ s) * u)
        return self.w + ETA * u - ETA * v

    def off(self, expected: Tensor) -> float:
        """How far the model is from the expected weights, over the length of the step."""
        return float((flat(self.model.parameters()) - expected).norm() / (expected - self.w).norm())


@pytest.mark.parametrize("mean", [False, True])
def test_protecting_every_sample_of_the_window(tmp_path: Path, mean: bool) -> None:
    """The mean is then in their span already: including it adds no direction."""
    naive = Naive(CleanLM().double())
    expected = naive.rosu(range(8))
    trainer = train(naive.model, tmp_path, protect_rank=8, include_mean=mean)
    assert naive.off(expected) < 1e-9
    logs = trainer.state.log_history[0]
    assert logs["subspace/rank"] == 8.0
    assert logs["subspace/retain_outside"] < 1e-7
    assert abs(logs["coupling/leak"]) < 1e-12


@pytest.mark.parametrize("batch", [8, 2, 1])
def test_some_samples_whatever_the_micro_batches(tmp_path: Path, batch: int) -> None:
    """The same three of eight are protected however the window is cut; which ones is found by trying all."""
    naive = Naive(CleanLM().double())
    norms = {}
    for chosen in combinations(range(8), 3):
        basis = naive.basis(chosen)
        norms[chosen] = float((naive.f - basis @ (basis.T @ naive.f)).norm())
    trainer = train(
        naive.model, tmp_path, protect_rank=3, per_device_train_batch_size=batch, gradient_accumulation_steps=8 // batch
    )
    logged = trainer.state.log_history[0]["norm/q"]
    (found,) = [chosen for chosen, norm in norms.items() if norm == pytest.approx(logged, rel=1e-9)]
    assert set(found) == {row for _, _, row in choose([[8]], 3, seed=42, step=0)}
    fresh = Naive(CleanLM().double())
    fresh.model = naive.model
    assert fresh.off(Naive(CleanLM().double()).rosu(found)) < 1e-9


@pytest.mark.parametrize("method", ["orthograd", "gu"])
def test_orthograd_and_gu_through_the_trainer(tmp_path: Path, method: str) -> None:
    """Without protect_rank they take up to eight samples, here the whole window."""
    naive = Naive(CleanLM().double())
    basis = naive.basis(range(8))
    onto = lambda x: basis @ (basis.T @ x)
    v = {
        "orthograd": 0.3 * naive.r - 0.7 * (naive.f - onto(naive.f)),
        "gu": onto(naive.r) - (naive.f - onto(naive.f)),
    }[method]
    own = {"orthograd_alpha": 0.3} if method == "orthograd" else {}
    train(naive.model, tmp_path, method=method, **own, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert naive.off(naive.w - ETA * v) < 1e-9


def test_a_smaller_default_window_takes_what_it_has(tmp_path: Path) -> None:
    trainer = train(CleanLM().double(), tmp_path, method="gu", per_device_train_batch_size=2, max_steps=2)
    assert [entry["subspace/rank"] for entry in trainer.state.log_history if "loss" in entry] == [2.0, 2.0]


def test_the_last_window_of_an_epoch_may_be_shorter(tmp_path: Path) -> None:
    trainer = train(
        CleanLM().double(), tmp_path, pairs=Pairs(samples(5, seed=1), samples(5, seed=2)),
        protect_rank=3, per_device_train_batch_size=4, max_steps=2,
    )  # fmt: skip
    assert [entry["subspace/rank"] for entry in trainer.state.log_history if "loss" in entry] == [3.0, 1.0]


def test_other_steps_and_seeds_choose_other_samples() -> None:
    chosen = {(seed, step): tuple(choose([[32]], 4, seed, step)) for seed in (0, 1) for step in range(5)}
    assert len(set(chosen.values())) == 10
    assert all(len(set(places)) == 4 for places in chosen.values())


def test_ranks_and_micro_batches_are_one_window() -> None:
    """Two ranks with two micro-batches of two see the order of one process with four."""
    alone = choose([[2, 2, 2, 2]], 5, seed=3, step=7)
    spread = choose([[2, 2], [2, 2]], 5, seed=3, step=7)
    assert [2 * micro + row for _, micro, row in alone] == [4 * micro + 2 * rank + row for rank, micro, row in spread]
    assert [row for _, _, row in choose([[8]], 5, 3, 7)] == [2 * micro + row for _, micro, row in alone]
    # a rank whose window is shorter, and rows without an answer
    assert sorted(choose([[2, 1], [1, 0]], 9, 0, 0)) == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]


def test_gathering_gives_each_rank_its_row() -> None:
    given = {0: torch.tensor([2.0, 1.0]), 1: torch.tensor([3.0, 0.0])}
    rows = []
    for rank in given:
        Ranks(rank, 2, lambda t: rows.append(t) or t).gather(given[rank])  # type: ignore[func-returns-value]
    assert torch.equal(torch.stack(rows).mean(0), torch.tensor([[2.0, 1.0], [3.0, 0.0]], dtype=torch.float64))


def test_a_single_sample_loses_the_padding_behind_it_only() -> None:
    batch = dict(ForgetRetainCollator(0)(RETAIN[:4]))
    for i, item in enumerate(RETAIN[:4]):
        one = single({**batch, "index": torch.arange(4), "name": "x"}, i)
        assert one["input_ids"].tolist() == [item["input_ids"]]
        assert one["labels"].tolist() == [item["labels"]]
        assert bool(one["attention_mask"].all())
        assert (one["index"].tolist(), one["name"]) == ([i], "x")
    left = {"input_ids": torch.tensor([[0, 5, 6, 0]]), "attention_mask": torch.tensor([[0, 1, 1, 0]])}
    assert single(left, 0)["input_ids"].tolist() == [[0, 5, 6]]
    assert single({"input_ids": torch.tensor([[5, 6]])}, 0)["input_ids"].tolist() == [[5, 6]]


def test_a_single_sample_keeps_a_predicted_end_that_is_not_attended_to() -> None:
    """Collators such as OpenUnlearning's mask an end of text that is the pad token; its label counts all the same."""
    batch = {
        "input_ids": torch.tensor([[5, 6, 2, 2], [5, 6, 7, 2]]),
        "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]),
        "labels": torch.tensor([[-100, 6, 2, -100], [-100, 6, 7, 2]]),
    }
    assert single(batch, 0)["labels"].tolist() == [[-100, 6, 2]]
    assert single(batch, 1)["labels"].tolist() == [[-100, 6, 7, 2]]


def test_samples_without_an_answer_are_not_taken(tmp_path: Path) -> None:
    silent = {"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}
    retain = [*samples(6, seed=2), silent, silent]
    trainer = train(CleanLM().double(), tmp_path, pairs=Pairs(FORGET, retain), protect_rank=8)
    assert trainer.state.log_history[0]["subspace/rank"] == 6.0


def test_dropout_of_the_other_passes_is_not_disturbed(tmp_path: Path) -> None:
    """The surrogate pass replays the retain pass also with sample passes around."""
    trainer = train(CleanLM(dropout=0.4), tmp_path, protect_rank=4, rho=1e-12, eps_q=0.0)
    logs = trainer.state.log_history[0]
    assert logs["loss/surrogate"] == logs["loss/retain"]


def test_a_rank_larger_than_the_window_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"protect_rank=9 is larger than the retain window, which has 8 samples"):
        train(CleanLM(), tmp_path, protect_rank=9, per_device_train_batch_size=2, gradient_accumulation_steps=4)


def test_repeated_retain_samples_are_refused_and_leave_the_weights(tmp_path: Path) -> None:
    model = CleanLM().double()
    before = flat(model.parameters())
    with pytest.raises(DataError, match="all point in one direction"):
        train(model, tmp_path, pairs=Pairs(FORGET, [RETAIN[0]] * 8), protect_rank=3)
    assert torch.equal(flat(model.parameters()), before)


def test_settings_are_checked_with_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="protect_rank=2 does nothing for method='pcgrad'"):
        ROSUConfig(output_dir=str(tmp_path), method="pcgrad", protect_rank=2)
    with pytest.raises(ConfigError, match="SGD does not keep"):
        train(CleanLM(), tmp_path, metric="adam")


def test_the_preflight_counts_samples(tmp_path: Path) -> None:
    trainer = train(CleanLM(), tmp_path, protect_rank=4, metric="adam", optim="adamw_torch")
    assert trainer.preflight is not None
    assert trainer.preflight.passes == 4 + 3
    # four samples, f, r, D⁻¹q and the backup
    assert trainer.preflight.buffers == 8 * trainer.preflight.gradients


@pytest.mark.parametrize("mean", [False, True])
def test_in_a_plain_loop(mean: bool) -> None:
    naive = Naive(CleanLM().double())
    expected = naive.rosu([1, 4], mean)
    model = naive.model
    loss = lambda items: lambda: mean_nll(model, dict(model.named_parameters()), items)
    optimizer = torch.optim.SGD(model.parameters(), lr=ETA)
    step = UnlearningStep(model, optimizer, rho=RHO, protect_rank=2, include_mean=mean)
    with pytest.raises(DataError, match="larger than the retain window, which has 1 samples"):
        step(loss(FORGET), loss(RETAIN), samples=[loss([RETAIN[1]])])
    with pytest.raises(DataError, match="needs 1 to 2"):
        step(loss(FORGET), loss(RETAIN), samples=[loss([x]) for x in RETAIN[:3]])
    logs = step(loss(FORGET), loss(RETAIN), samples=[loss([RETAIN[1]]), loss([RETAIN[4]])])
    assert naive.off(expected) < 1e-9
    basis = naive.basis([1, 4])
    outside = float((naive.r - basis @ (basis.T @ naive.r)).norm())
    assert logs["subspace/rank"] == 2.0 + mean
    assert logs["subspace/retain_outside"] == pytest.approx(0.0 if mean else outside / float(naive.r.norm()), abs=1e-7)
    # the first-order change of the mean retain loss is within ρ‖(I − P_U) r‖
    assert 0.0 < abs(logs["coupling/leak"]) <= RHO * outside or mean


@pytest.mark.parametrize(
    "settings", [{"protect_rank": 3}, {"protect_rank": 3, "metric": "adam"}, {"metric": "adam"}, {"method": "gu"},
                 {"method": "orthograd", "protect_rank": 2}],
    ids=str,
)  # fmt: skip
def test_memory_is_that_of_the_preflight(settings: dict[str, Any]) -> None:
    """What the space holds after a second step (the first has no metric yet), in bytes."""
    model = CleanLM()
    optimizer = torch.optim.AdamW(model.parameters())
    rule = build_rule(**{"method": "rosu", **settings})
    loss = lambda items: lambda: mean_nll(model, dict(model.named_parameters()), items)
    step = UnlearningStep(model, optimizer, **settings)
    for _ in range(2):
        step(loss(FORGET), loss(RETAIN), samples=[loss([x]) for x in RETAIN[: rule.samples]])
    assert step.space.held_bytes() == preflight(model, rule, optimizer).buffers


def test_a_broken_sample_is_named_and_leaves_the_weights() -> None:
    model = CleanLM()
    before = flat(model.parameters())
    loss = lambda items, factor=1.0: lambda: factor * mean_nll(model, dict(model.named_parameters()), items)
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.1), protect_rank=2)
    with pytest.raises(NonFiniteError, match="The retain sample 2 loss is nan"):
        step(loss(FORGET), loss(RETAIN), samples=[loss(RETAIN[:1]), loss(RETAIN[1:2], float("nan"))])
    assert torch.equal(flat(model.parameters()), before)


def test_statistics_of_normalisation_do_not_follow_single_samples() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    twin = copy.deepcopy(model)
    loss = lambda data: lambda: model(data).square().mean()
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.0), protect_rank=2, amplify="direct")
    step(loss(x), loss(y), samples=[loss(5.0 * y[:2]), loss(5.0 * y[2:4])])
    twin(y)  # what the retain pass at w sees; forget samples leave the statistics alone
    assert torch.equal(model[1].running_mean, twin[1].running_mean)
