"""The pull fades as the forget loss reaches that of unseen data, measured no more often than asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from math import inf, isnan, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from rosu_llm.step import Calibration
from rosu_llm.training.window import mean_nll
from tests.losses import naive
from tests.models import CleanLM, samples

HOLDOUT = samples(5, seed=11)


class Source:
    """Hands out held-out batches and counts how often it was asked."""

    def __init__(self, *parts: list[naive.Sample]) -> None:
        self.parts, self.asked = parts, 0

    def __call__(self) -> list[dict[str, Tensor]]:
        self.asked += 1
        return [naive.padded(part, 16) for part in self.parts]


def measure(
    model: Any,
    batches: Any,
    mean: Callable[[Tensor], Tensor] = lambda values: values,
    context: Callable[[], Any] = contextlib.nullcontext,
) -> float:
    return mean_nll(model, batches, context, mean)


def held_out(source: Source, model: Any, every: int = 1) -> Calibration:
    return Calibration(lambda: measure(model, source()), every=every)


@pytest.mark.parametrize(
    ("target", "margin", "forget", "factor"),
    [
        (3.0, 1.0, 0.0, 1.0),
        (3.0, 1.0, 2.0, 1.0),
        (3.0, 1.0, 2.75, 0.25),
        (3.0, 1.0, 3.0, 0.0),
        (3.0, 1.0, 9.0, 0.0),
        (3.0, 4.0, 1.0, 0.5),
        (0.5, 0.25, 0.375, 0.5),
        (3.0, 1.0, nan, 0.0),
        (3.0, 1.0, inf, 0.0),
        (3.0, 1.0, -inf, 0.0),
    ],
)
def test_factor_against_a_fixed_target(target: float, margin: float, forget: float, factor: float) -> None:
    """Full at a gap of one margin or more, linear within, nothing beyond or where there is no number."""
    assert Calibration(target, margin=margin).factor({"forget": forget}) == factor


def test_a_fixed_target_never_looks_at_held_out_data() -> None:
    fixed = Calibration(2.0)
    for step in range(5):
        fixed.refresh(step)
    assert (fixed.target, fixed.measures) == (2.0, False)


def test_before_the_first_measurement_nothing_is_pulled() -> None:
    assert held_out(Source(HOLDOUT), CleanLM()).factor({"forget": 0.0}) == 0.0


def test_the_target_is_the_mean_over_all_held_out_answer_tokens() -> None:
    """Over tokens, not over batches: the batches here have different numbers of them."""
    model = CleanLM(seed=3).double()
    losses = [x for s in HOLDOUT for x in naive.token_losses(model, s)]
    measured = held_out(Source(HOLDOUT[:1], HOLDOUT[1:]), model)
    measured.refresh(0)
    assert measured.target == pytest.approx(sum(losses) / len(losses), rel=1e-12)  # float64 sums in another order
    assert measured.factor({"forget": measured.target - 0.3}) == pytest.approx(
        0.3, rel=1e-9
    )  # difference of numbers near 4


@pytest.mark.parametrize(("every", "first", "due"), [(1, 0, [0, 1, 2, 3]), (3, 0, [0, 3, 6, 9]), (4, 2, [2, 4, 8])])
def test_measured_at_first_and_then_every_so_many_steps(every: int, first: int, due: list[int]) -> None:
    source, model = Source(HOLDOUT), CleanLM()
    measured = held_out(source, model, every)
    seen = []
    for step in range(first, 10):
        before = source.asked
        measured.refresh(step)
        if source.asked > before:
            seen.append(step)
    assert seen[: len(due)] == due


def test_a_target_restored_from_a_checkpoint_holds_until_the_next_is_due() -> None:
    source = Source(HOLDOUT)
    measured = held_out(source, CleanLM(), 4)
    measured.target = 1.25
    measured.refresh(5)
    assert (measured.target, source.asked) == (1.25, 0)
    measured.refresh(8)
    assert source.asked == 1
    assert measured.target != 1.25


def test_the_measurement_follows_the_model() -> None:
    model = CleanLM(seed=1)
    measured = held_out(Source(HOLDOUT), model)
    measured.refresh(0)
    before = measured.target
    model.load_state_dict(CleanLM(seed=2).state_dict())
    measured.refresh(1)
    assert measured.target != before


@pytest.mark.parametrize("training", [True, False])
def test_measuring_uses_no_dropout_no_graph_and_keeps_the_mode(training: bool) -> None:
    model = CleanLM(dropout=0.5).double().train(training)
    state = torch.get_rng_state()
    values = {measure(model, Source(HOLDOUT)()) for _ in range(3)}
    assert len(values) == 1
    assert model.training is training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(KeyError):
        measure(model, [{"input_ids": torch.tensor([[4, 5]])}])
    assert model.training is training


def test_over_ranks_tokens_are_pooled() -> None:
    """Sums and counts are averaged, not ratios: a rank with more tokens weighs more."""
    model = CleanLM(seed=3).double()
    there = [x for s in HOLDOUT[2:] for x in naive.token_losses(model, s)]
    other = torch.tensor([sum(there), len(there)], dtype=torch.float64)
    every = [x for s in HOLDOUT for x in naive.token_losses(model, s)]
    got = measure(model, Source(HOLDOUT[:2])(), mean=lambda here: (here + other) / 2)
    assert got == pytest.approx(sum(every) / len(every), rel=1e-12)  # float64 sums in another order


def test_held_out_data_without_answers_measures_nothing_and_pulls_nothing() -> None:
    measured = held_out(Source([naive.unanswered([4, 5, 6])]), CleanLM())
    measured.refresh(0)
    assert measured.target is not None and isnan(measured.target)
    assert measured.factor({"forget": 0.0}) == 0.0


def test_forwards_run_inside_the_given_context() -> None:
    """Under autocast the figures are those of bf16 arithmetic."""
    model = CleanLM()
    plain = measure(model, Source(HOLDOUT)())
    cast = measure(model, Source(HOLDOUT)(), context=lambda: torch.autocast("cpu", torch.bfloat16))
    assert cast != plain
    assert cast == pytest.approx(plain, rel=0.02)  # bf16 has 8 bits of mantissa
