"""A window's loss is its total over its count, however it is cut into micro-batches and ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rosu_llm.data.pairing import ForgetRetainCollator
from rosu_llm.errors import DataError
from rosu_llm.losses import LossContext, get_loss
from rosu_llm.training.window import WindowLoss, check_batch
from tests.losses import naive
from tests.models import CleanLM, flat, samples

DATA = samples(7, seed=6, shortest=5, longest=25)
CUTS = [[7], [1] * 7, [2, 4, 1], [6, 1]]


def split(sizes: list[int], data: list[naive.Sample] = DATA) -> list[list[naive.Sample]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(data[start : start + size])
        start += size
    return parts


def window(
    name: str = "nll",
    reduction: str = "window_tokens",
    mean: Callable[[Tensor], Tensor] = lambda values: values,
    **options: float,
) -> WindowLoss:
    context = LossContext(options)
    return WindowLoss(get_loss(name, "forget"), context, reduction, contextlib.nullcontext, mean)


def total(loss: WindowLoss, model: CleanLM, parts: list[list[naive.Sample]]) -> float:
    """Value of the window; its gradient is left in ``.grad``."""
    model.zero_grad()
    value = 0.0
    for closure in loss.closures(model, [ForgetRetainCollator()(part) for part in parts], "forget"):
        share = closure()
        share.backward()
        value += float(share.detach())
    return value


@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_window_tokens_is_the_mean_over_all_answer_tokens(sizes: list[int]) -> None:
    model = CleanLM().double()
    losses = [x for s in DATA for x in naive.token_losses(model, s)]
    got = total(window(), model, split(sizes))
    assert got == pytest.approx(sum(losses) / len(losses), rel=1e-12)  # float64 sums in another order
    gradient = flat(p.grad for p in model.parameters())
    total(window(), model, [DATA])
    # the same float64 terms accumulated in another order
    assert torch.allclose(gradient, flat(p.grad for p in model.parameters()), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_micro_mean_is_the_mean_of_micro_batch_means(sizes: list[int]) -> None:
    model = CleanLM().double()
    means = []
    for part in split(sizes):
        losses = [x for s in part for x in naive.token_losses(model, s)]
        means.append(sum(losses) / len(losses))
    got = total(window(reduction="micro_mean"), model, split(sizes))
    assert got == pytest.approx(sum(means) / len(means), rel=1e-12)  # float64 sums in another order


def test_ragged_micro_batches_tell_the_two_reductions_apart() -> None:
    model = CleanLM().double()
    parts = split([6, 1])
    assert abs(total(window(), model, parts) - total(window(reduction="micro_mean"), model, parts)) > 1e-3


@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_losses_per_sequence_are_divided_by_answered_sequences(sizes: list[int]) -> None:
    model = CleanLM().double()
    data = [*DATA[:6], naive.unanswered([9, 9, 9])]
    expected = naive.simnpo(model, data, 2.0, 0.1) / 6
    got = total(window("simnpo", simnpo_beta=2.0, simnpo_delta=0.1), model, split(sizes, data))
    assert got == pytest.approx(expected, rel=1e-12)  # float64 sums in another order


@pytest.mark.parametrize("reduction", ["window_tokens", "micro_mean"])
def test_a_micro_batch_without_answers_adds_nothing(reduction: str) -> None:
    model = CleanLM().double()
    empty = [naive.unanswered([5, 6, 7])]
    got = total(window(reduction=reduction), model, [DATA[:3], empty])
    losses = [x for s in DATA[:3] for x in naive.token_losses(model, s)]
    shares = 2 if reduction == "micro_mean" else 1  # a mean over micro-batches counts the empty one as zero
    assert got == pytest.approx(sum(losses) / len(losses) / shares, rel=1e-12)  # float64 sums in another order


def test_over_ranks_the_average_of_windows_is_the_mean_over_all_tokens() -> None:
    """Two ranks with different numbers of tokens, as DDP averages them."""
    model = CleanLM().double()
    ranks = [split([1, 2], DATA[:3]), split([3, 1], DATA[3:])]
    counts = [sum(len(naive.rows(model, s)) for part in rank for s in part) for rank in ranks]
    assert counts[0] != counts[1]
    mean = torch.tensor([sum(counts) / 2], dtype=torch.float64)
    values = [total(window(mean=lambda _: mean), model, rank) for rank in ranks]
    losses = [x for s in DATA for x in naive.token_losses(model, s)]
    assert sum(values) / 2 == pytest.approx(sum(losses) / len(losses), rel=1e-12)  # float64 sums in another order


def test_a_rank_without_answers_is_fine_while_another_has_some() -> None:
    model = CleanLM().double()
    mean = torch.tensor([12.0], dtype=torch.float64)
    assert total(window(mean=lambda _: mean), model, [[naive.unanswered([5, 6, 7])]]) == 0.0


@pytest.mark.parametrize("reduction", ["window_tokens", "micro_mean"])
@pytest.mark.parametrize("sample", [naive.unanswered([5, 6, 7]), naive.first_only([5, 6, 7])])
def test_a_window_without_answer_token_is_refused(reduction: str, sample: naive.Sample) -> None:
    batch = ForgetRetainCollator()([sample])
    with pytest.raises(DataError, match="The forget window has no answer token"):
        window(reduction=reduction).closures(CleanLM(), [batch, batch], "forget")


def test_forwards_run_inside_the_given_context_and_only_when_called() -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def note() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    loss = WindowLoss(get_loss("nll", "retain"), LossContext(), "window_tokens", note, lambda values: values)
    closures = loss.closures(CleanLM(), [ForgetRetainCollator()(DATA[:2])] * 3, "retain")
    assert entered == []
    for closure in closures:
        closure()
    assert entered == ["in", "out"] * 3


GOOD: dict[str, Any] = {"input_ids": torch.ones(1, 2), "labels": torch.ones(1, 2)}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "must be a mapping.*not list"),
        (None, "not NoneType"),
        ({"retain": GOOD}, r"keys \['retain'\] but no 'forget'"),
        ({"forget": GOOD}, "no 'retain'"),
        ({"input_ids": 1, "labels": 2}, r"keys \['input_ids', 'labels'\] but no 'forget'"),
        ({"forget": [GOOD], "retain": GOOD}, r"batch\['forget'\] must hold input_ids and labels, not list"),
        ({"forget": GOOD, "retain": {"labels": 1}}, r"batch\['retain'\] has keys \['labels'\] but no 'input_ids'"),
        ({"forget": {"input_ids": 1}, "retain": GOOD}, r"batch\['forget'\] has keys \['input_ids'\] but no 'labels'"),
        ({1: 2}, "keys .*1.* but no 'forget'"),
    ],
)
def test_a_batch_the_step_cannot_use_is_described(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_batch(batch)


def test_only_the_parts_a_method_uses_are_asked_for() -> None:
    check_batch({"retain": GOOD}, ("retain",))
    check_batch({"forget": GOOD}, ("forget",))
    check_batch({"forget": GOOD, "retain": GOOD, "index": 3})
    check_batch(ForgetRetainCollator()([{"forget": DATA[0], "retain": DATA[1:3]}]))


@pytest.mark.parametrize("reduction", ["window_tokens", "micro_mean"])
def test_a_shorter_window_joins_every_collective_without_changing_the_loss(reduction: str) -> None:
    """Another rank has four micro-batches, this one two: two more run, with weight zero."""
    model = CleanLM().double()
    batches = [ForgetRetainCollator()(part) for part in split([4, 3])]
    alone = window(reduction=reduction).closures(model, batches, "forget")
    padded = window(reduction=reduction).closures(model, batches, "forget", count=4)
    assert len(padded) == 4
    assert sum(float(c()) for c in padded) == sum(float(c()) for c in alone)
    assert [float(c()) for c in padded[2:]] == [0.0, 0.0]
