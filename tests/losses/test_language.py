"""Every loss is the sum over its units that a loop over single tokens gives, padding and all."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rosu_llm.losses import COUNT, LossContext, answer_mask, get_loss, logits_of, sequence_logprobs, token_nll
from tests.losses import naive
from tests.models import CleanLM, flat, samples, tiny_llama

BATCH = [*samples(5, seed=3), naive.unanswered([9, 8, 7]), naive.first_only([11, 12, 13, 14])]
ANSWERED = BATCH[:5]
BETAS = {"npo_beta": 0.7, "simnpo_beta": 2.5, "simnpo_delta": 0.3}
INITIAL = CleanLM(seed=1).double()

TRUTH: dict[str, Callable[[nn.Module, Any], float]] = {
    "nll": naive.nll,
    "kl": lambda model, batch: naive.kl(model, batch, INITIAL),
    "npo": lambda model, batch: naive.npo(model, batch, INITIAL, 0.7),
    "simnpo": lambda model, batch: naive.simnpo(model, batch, 2.5, 0.3),
}


def context(batch: list[naive.Sample], options: dict[str, float] = BETAS) -> LossContext:
    """References computed by the loop, not by the package."""
    return LossContext(
        options=options,
        reference_logprobs=lambda _: torch.tensor([naive.logprob(INITIAL, s) for s in batch], dtype=torch.float64),
        reference_logits=lambda b: INITIAL(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits,
    )


def loss(name: str, model: nn.Module, batch: list[naive.Sample], width: int = 14, **how: Any) -> Tensor:
    role = "retain" if name == "kl" else "forget"
    return get_loss(name, role).function(model, naive.padded(batch, width, **how), context(batch))


def value(name: str, model: nn.Module, batch: list[naive.Sample], **how: Any) -> float:
    return float(loss(name, model, batch, **how).detach())


@pytest.mark.parametrize("name", TRUTH)
def test_value_is_the_sum_over_single_tokens(name: str) -> None:
    model = CleanLM(seed=2).double()
    # float64 on both sides; a few hundred additions in another order
    assert value(name, model, BATCH) == pytest.approx(TRUTH[name](model, BATCH), rel=1e-11)


@pytest.mark.parametrize("name", TRUTH)
def test_gradient_is_the_slope_of_the_loop(name: str) -> None:
    """Central differences of the naive value along random directions; autograd plays no part in the truth."""
    model = CleanLM(seed=2).double()
    loss(name, model, BATCH).backward()
    gradient = [p.grad for p in model.parameters()]
    torch.manual_seed(5)
    for _ in range(3):
        direction = [torch.randn_like(p) for p in model.parameters()]
        expected = naive.directional(lambda: TRUTH[name](model, BATCH), model, direction)
        # truncation h² f‴ ≈ 1e-9 and cancellation ε·|loss|/h ≈ 1e-9 of a slope of order 10
        assert float(flat(gradient) @ flat(direction)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("how", [{"width": 23}, {"width": 14, "left": True}, {"width": 19, "left": True, "pad": 5}])
@pytest.mark.parametrize("name", TRUTH)
def test_padding_changes_nothing(name: str, how: dict[str, Any]) -> None:
    """On either side, for samples whose first token carries no label (on the left a pad would predict it)."""
    model, batch = CleanLM(seed=2).double(), BATCH[:6]
    # the same float64 numbers summed in rows of another length
    assert value(name, model, batch, **how) == pytest.approx(value(name, model, batch), rel=1e-12)


@pytest.mark.parametrize("name", TRUTH)
def test_sums_add_up_over_any_split_of_the_batch(name: str) -> None:
    """Sums, not means: a batch twice over is worth twice as much, and parts add up to the whole."""
    model = CleanLM(seed=2).double()
    whole = value(name, model, BATCH)
    parts = sum(value(name, model, BATCH[a:b]) for a, b in ((0, 1), (1, 4), (4, 7)))
    assert parts == pytest.approx(whole, rel=1e-12)  # float64 additions in another order
    assert value(name, model, BATCH + BATCH) == pytest.approx(2.0 * whole, rel=1e-12)  # likewise


@pytest.mark.parametrize("name", TRUTH)
def test_rows_without_an_answer_add_nothing(name: str) -> None:
    model = CleanLM(seed=2).double()
    assert value(name, model, BATCH) == value(name, model, ANSWERED)
    empty = loss(name, model, BATCH[5:])
    empty.backward()
    assert float(empty.detach()) == 0.0
    assert float(flat(p.grad for p in model.parameters()).abs().max()) == 0.0


def test_counts_are_answer_tokens_and_answered_sequences() -> None:
    batch = naive.padded(BATCH, 17)
    assert int(COUNT["token"](batch)) == sum(len(naive.rows(INITIAL, s)) for s in BATCH)
    assert int(COUNT["sequence"](batch)) == 5
    assert answer_mask(batch["labels"]).shape == (7, 16)


def test_token_and_sequence_figures_sit_where_the_tokens_are() -> None:
    model = CleanLM(seed=2).double()
    batch = naive.padded(BATCH, 15)
    got = token_nll(logits_of(model, batch), batch["labels"]).tolist()
    for row, sample in zip(got, BATCH, strict=True):
        expected = [0.0] * 14
        answer = [t - 1 for t, label in enumerate(sample["labels"]) if t and label != -100]
        for place, value in zip(answer, naive.token_losses(model, sample), strict=True):
            expected[place] = value
        assert row == pytest.approx(expected, rel=1e-12)  # float64, one softmax each
    sums = sequence_logprobs(logits_of(model, batch), batch["labels"]).tolist()
    assert sums == pytest.approx([naive.logprob(model, s) for s in BATCH], rel=1e-12)  # float64 sums of ≤ 11 terms


@pytest.mark.parametrize("name", ["nll", "npo", "simnpo"])
@pytest.mark.parametrize("sample", ANSWERED)
def test_raising_a_forget_loss_makes_the_answer_less_likely(name: str, sample: naive.Sample) -> None:
    """The sign convention: one small step uphill lowers log p(answer)."""
    model = CleanLM(seed=2).double()
    before = naive.logprob(model, sample)
    loss(name, model, [sample]).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.grad, alpha=1e-3)
    assert naive.logprob(model, sample) < before


def test_npo_starts_as_gradient_ascent_on_the_nll() -> None:
    """At the reference weights (2/β) log σ(0) = −2 log 2/β per sequence and the slope is that of the NLL, for any β."""
    for beta in (0.05, 1.0, 7.0):
        model = CleanLM(seed=1).double()
        spec = get_loss("npo", "forget")
        start = spec.function(model, naive.padded(BATCH, 14), context(BATCH, {"npo_beta": beta}))
        assert float(start.detach()) == pytest.approx(
            -5 * 2.0 * log(2.0) / beta, rel=1e-12
        )  # log-ratios are 0 to 1e-14
        start.backward()
        got = flat(p.grad for p in model.parameters())
        model.zero_grad()
        loss("nll", model, BATCH).backward()
        # σ(0) = ½ to 1e-15, then the same backward pass scaled
        assert torch.allclose(got, flat(p.grad for p in model.parameters()), rtol=1e-10, atol=1e-12)


def test_kl_vanishes_with_its_slope_at_the_initial_weights_and_is_positive_elsewhere() -> None:
    same = CleanLM(seed=1).double()
    zero = loss("kl", same, BATCH)
    zero.backward()
    assert abs(float(zero.detach())) < 1e-12  # a sum of 40·61 terms p·(log p − log p)
    assert float(flat(p.grad for p in same.parameters()).norm()) < 1e-12  # p − p through one backward pass
    assert value("kl", CleanLM(seed=2).double(), BATCH) > 0.1


def test_kl_sends_no_gradient_into_the_reference() -> None:
    reference, model = CleanLM(seed=1).double(), CleanLM(seed=2).double()
    given = LossContext(reference_logits=lambda b: logits_of(reference, b))
    get_loss("kl", "retain").function(model, naive.padded(BATCH, 14), given).backward()
    assert all(p.grad is None for p in reference.parameters())


def test_extreme_log_ratios_stay_finite() -> None:
    """log σ of ±10⁴ is computed without overflow, with its slope."""
    for shift in (-1e4, 1e4):
        model = CleanLM().double()
        given = LossContext(
            options={"npo_beta": 1.0},
            reference_logprobs=lambda b: torch.full((len(BATCH),), shift, dtype=torch.float64),
        )
        total = get_loss("npo", "forget").function(model, naive.padded(BATCH, 14), given)
        total.backward()
        assert torch.isfinite(total)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


class Spy(nn.Module):
    """Remembers what its forward was given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.seen = dtype, set[str]()

    def forward(self, **inputs: Any) -> SimpleNamespace:
        self.seen = set(inputs)
        return SimpleNamespace(logits=torch.zeros(*inputs["input_ids"].shape, 4, dtype=self.dtype))


def test_the_model_sees_no_labels_and_no_foreign_columns() -> None:
    spy = Spy(torch.float32)
    logits_of(spy, {**naive.padded(BATCH, 14), "index": torch.arange(7), "position_ids": torch.zeros(7, 14)})
    assert spy.seen == {"input_ids", "attention_mask", "position_ids"}


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64,) * 2,
    ],
)
def test_logits_are_at_least_float32(given: torch.dtype, got: torch.dtype) -> None:
    assert logits_of(Spy(given), naive.padded(BATCH, 14)).dtype == got


def test_nll_is_the_loss_a_transformers_model_computes_itself() -> None:
    model = tiny_llama(seed=3).eval()
    batch = naive.padded(ANSWERED, 14)
    with torch.no_grad():
        expected = float(model(**batch).loss) * int(COUNT["token"](batch))
        got = float(get_loss("nll", "retain").function(model, batch, LossContext()))
    assert got == pytest.approx(expected, rel=1e-6)  # float32 mean against float32 sum over 35 tokens
