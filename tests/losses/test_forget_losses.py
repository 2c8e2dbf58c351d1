"""Refusals, alternates, distillation and token weights against loops over single tokens in float64."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, expm1, log
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from rosu_llm.errors import DataError
from rosu_llm.losses import COUNT, LOSSES, LossContext, get_loss
from rosu_llm.losses.depth import Depth
from rosu_llm.losses.preference import stacked
from rosu_llm.losses.reference import ReferenceLogProbs
from rosu_llm.training.regroup import regroup
from tests.losses import naive
from tests.models import CleanLM, flat, samples

BATCH = [*samples(5, seed=3), naive.unanswered([9, 8, 7]), naive.first_only([11, 12, 13, 14])]
#: Shorter and longer than the answers; one sample with an answer has none.
OTHER = [*samples(4, seed=8), naive.unanswered([4, 5]), *samples(2, seed=9)]
OPTIONS = {"dpo_beta": 0.7, "undial_beta": 3.0, "wga_beta": 0.5, "satimp_beta1": 2.0, "satimp_beta2": 0.5}
INITIAL = CleanLM(seed=1).double()
NAMES = ("idk_nll", "idk_dpo", "altpo", "undial", "wga", "satimp", "odds")


def weights(name: str, model: nn.Module, batch: Any) -> list[float]:
    own = naive.probabilities(model, batch)
    return [p**0.5 for p in own] if name == "wga" else [p**2.0 * (1.0 - p) ** 0.5 for p in own]


TRUTH: dict[str, Callable[[nn.Module, Any, Any], float]] = {
    "idk_nll": lambda model, batch, other: -naive.nll(model, other),
    "idk_dpo": lambda model, batch, other: naive.dpo(model, batch, other, INITIAL, 0.7),
    "altpo": lambda model, batch, other: naive.dpo(model, batch, other, INITIAL, 0.7),
    "undial": lambda model, batch, other: naive.undial(model, batch, INITIAL, 3.0),
    "wga": lambda model, batch, other: naive.weighted(model, batch, weights("wga", model, batch)),
    "satimp": lambda model, batch, other: naive.weighted(model, batch, weights("satimp", model, batch)),
    "odds": lambda model, batch, other: sum(map(naive.odds_against, naive.probabilities(model, batch))),
}


def batch_of(batch: Any, other: Any, width: int = 14, other_width: int = 15, **how: Any) -> dict[str, Any]:
    return {**naive.padded(batch, width, **how), "alternate": naive.padded(other, other_width, **how)}


def context(*parts: Any, gate: Any = None) -> LossContext:
    """References by the loop; a batch is recognised by its number of tokens."""
    known = ReferenceLogProbs()
    for part in parts:
        for one in part:
            (key,) = _keys(one)
            known.values[key] = (naive.logprob(INITIAL, one),)
    return LossContext(
        options=OPTIONS,
        reference_logprobs=lambda b: known(b).double(),
        reference_logits=lambda b: INITIAL(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits,
        gate=gate,
    )


def _keys(sample: naive.Sample) -> list[str]:
    from rosu_llm.losses.reference import sample_keys

    return sample_keys(naive.padded([sample], len(sample["input_ids"])))


def loss(name: str, model: nn.Module, batch: Any = BATCH, other: Any = OTHER, **how: Any) -> Tensor:
    return get_loss(name, "forget").function(model, batch_of(batch, other, **how), context(batch, other))


@pytest.mark.parametrize("name", NAMES)
def test_value_is_the_sum_over_single_tokens(name: str) -> None:
    model = CleanLM(seed=2).double()
    # float32 reference log-probabilities of up to 50 nats, kept as the package keeps them
    tolerance = 1e-6 if LOSSES[name].reference == "logprobs" else 1e-11
    assert float(loss(name, model)) == pytest.approx(TRUTH[name](model, BATCH, OTHER), rel=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_the_slope_of_the_loop(name: str) -> None:
    """Central differences of the loop; the weights of tokens are constants there too."""
    model = CleanLM(seed=2).double()
    loss(name, model).backward()
    gradient = [p.grad for p in model.parameters()]
    fixed = weights(name, model, BATCH) if name in ("wga", "satimp") else None

    def value() -> float:
        return TRUTH[name](model, BATCH, OTHER) if fixed is None else naive.weighted(model, BATCH, fixed)

    torch.manual_seed(5)
    for _ in range(2):
        direction = [torch.randn_like(p) for p in model.parameters()]
        expected = naive.directional(value, model, direction)
        # truncation and cancellation as in test_language; σ(β·margin) sees the float32 references to 1e-6
        assert float(flat(gradient) @ flat(direction)) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("how", [{"width": 23}, {"other_width": 19, "left": True}, {"width": 20, "pad": 5}])
@pytest.mark.parametrize("name", NAMES)
def test_padding_of_either_answer_changes_nothing(name: str, how: dict[str, Any]) -> None:
    model, batch, other = CleanLM(seed=2).double(), BATCH[:6], OTHER[:6]
    assert float(loss(name, model, batch, other, **how)) == pytest.approx(
        float(loss(name, model, batch, other)), rel=1e-12
    )


@pytest.mark.parametrize("name", NAMES)
def test_parts_add_up_to_the_whole(name: str) -> None:
    model = CleanLM(seed=2).double()
    parts = sum(float(loss(name, model, BATCH[a:b], OTHER[a:b])) for a, b in ((0, 1), (1, 4), (4, 7)))
    assert parts == pytest.approx(float(loss(name, model)), rel=1e-12)  # float64 additions in another order


@pytest.mark.parametrize("name", NAMES)
def test_cutting_a_window_by_length_keeps_answers_and_alternates_together(name: str) -> None:
    """The loss of a window is the same however its samples are grouped, and so is the number of its units."""
    model = CleanLM(seed=2).double()
    window = [batch_of(BATCH[:4], OTHER[:4]), batch_of(BATCH[4:], OTHER[4:], width=16, other_width=14)]
    spec, given = get_loss(name, "forget"), context(BATCH, OTHER)
    whole = sum(float(spec.function(model, batch, given)) for batch in window)
    units = sum(int(COUNT[spec.unit](batch)) for batch in window)
    for tokens in (None, 0, 40, 1000):
        micro = regroup({"forget": window}, tokens)["forget"]
        assert sum(int(COUNT[spec.unit](batch)) for batch in micro) == units
        assert sum(float(spec.function(model, batch, given)) for batch in micro) == pytest.approx(whole, rel=1e-12)
        for batch in micro if tokens else ():
            both = stacked(batch, batch["alternate"])["input_ids"]
            assert both.numel() <= tokens or len(both) == 2


def test_units_are_refusal_tokens_sequences_and_answer_tokens() -> None:
    batch = batch_of(BATCH, OTHER)
    assert int(COUNT["alternate"](batch)) == sum(len(naive.rows(INITIAL, s)) for s in OTHER)
    assert {name: LOSSES[name].unit for name in NAMES} == {
        "idk_nll": "alternate",
        **dict.fromkeys(("idk_dpo", "altpo"), "sequence"),
        **dict.fromkeys(("undial", "wga", "satimp", "odds"), "token"),
    }


@pytest.mark.parametrize("start", [1e-12, 1e-6, 1e-3, 0.00999, 0.01001, 0.5, 5.0, 40.0, 200.0])
def test_odds_move_known_and_unknown_tokens_alike(start: float) -> None:
    """Along the token's own logit the slope is 1 wherever p < .99, and nowhere more than 100 times that of −log p."""
    losses = torch.tensor([[start, 0.0]], dtype=torch.float64, requires_grad=True)
    with mock.patch("rosu_llm.losses.weighted.answer_nll", return_value=losses):
        batch = {"labels": torch.tensor([[-100, 7, -100]])}
        value = get_loss("odds", "forget").function(nn.Identity(), batch, LossContext())
    (slope,) = torch.autograd.grad(value, losses)
    assert float(value) == pytest.approx(naive.odds_against(exp(-start)), rel=1e-9, abs=1e-12)
    # d(−log p)/d(logit of the token) is 1 − p
    assert float(slope[0, 0]) * -expm1(-start) == pytest.approx(min(1.0, -expm1(-start) / 0.01), rel=1e-12)
    assert float(slope[0, 1]) == 0.0


def test_dpo_starts_at_log_two_and_prefers_the_alternate() -> None:
    """At the initial weights every margin is zero; uphill the alternate gains and the answer loses."""
    model, batch, other = CleanLM(seed=1).double(), BATCH[:4], OTHER[:4]
    start = loss("altpo", model, batch, other)
    assert float(start) == pytest.approx(-4 * 2.0 * log(2.0) / 0.7, rel=1e-6)  # float32 references
    start.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.grad, alpha=1e-3)
    assert naive.nll(model, other) < naive.nll(INITIAL, other)
    assert naive.nll(model, batch) > naive.nll(INITIAL, batch)


def test_undial_is_at_rest_where_the_model_is_the_lowered_teacher() -> None:
    """The gradient at the logits is q − p: with β → 0 and the initial weights there is none."""
    model = CleanLM(seed=1).double()
    given = context(BATCH, OTHER)
    rest = get_loss("undial", "forget").function(
        model, batch_of(BATCH, OTHER), LossContext({"undial_beta": 0.0}, reference_logits=given.reference_logits)
    )
    rest.backward()
    assert float(flat(p.grad for p in model.parameters()).norm()) < 1e-12  # q − p through one backward pass


@pytest.mark.parametrize("name", ["idk_dpo", "altpo"])
def test_bounded_samples_weigh_their_whole_comparison(name: str) -> None:
    """The gradient is Σ wᵢ ∇(term of sample i), wᵢ from the loss of its answer."""
    batch, other = BATCH[:5], [*OTHER[:4], OTHER[5]]
    model = CleanLM(seed=2).double()
    levels = [naive.nll(model, [s]) / len(naive.token_losses(model, s)) for s in batch]
    target = sorted(levels)[2]
    depth = Depth(lambda b: torch.full((5,), target, dtype=torch.float64), 0.3)
    whole = batch_of(batch, other)
    gate = depth.gate(whole)
    with gate.on(model):
        get_loss(name, "forget").function(model, whole, context(batch, other, gate=gate)).backward()
    got = flat(p.grad for p in model.parameters()).clone()
    expected = torch.zeros_like(got)
    for one, alternate, level in zip(batch, other, levels, strict=True):
        model.zero_grad()
        loss(name, model, [one], [alternate]).backward()
        weight = min(1.0, max(0.0, (target - level) / 0.3))
        expected += weight * flat(p.grad for p in model.parameters())
    assert torch.allclose(got, expected, rtol=1e-9, atol=1e-12)  # float64 sums in another order
    assert float(expected.norm()) > 0.0


@pytest.mark.parametrize("name", ["idk_nll", "idk_dpo", "altpo"])
def test_a_batch_without_third_answers_is_one_clear_error(name: str) -> None:
    model = CleanLM(seed=2).double()
    with pytest.raises(DataError, match=r"no 'alternate'.*set refusals or alternates"):
        get_loss(name, "forget").function(model, naive.padded(BATCH, 14), context(BATCH))
    short = {**naive.padded(BATCH, 14), "alternate": naive.padded(OTHER[:3], 14)}
    with pytest.raises(DataError, match="7 answers and 3 alternate"):
        get_loss(name, "forget").function(model, short, context(BATCH, OTHER))
