"""The gradient of every forget sample is weighted by how far it is from its target; against a loop over samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rosu_llm.errors import ConfigError
from rosu_llm.losses import LossContext, ReferenceLogProbs, get_loss
from rosu_llm.losses.depth import GATE, Depth, returned
from rosu_llm.training.method_checks import BEYOND
from tests.losses import naive
from tests.models import CleanLM, samples

BATCH = [*samples(5, seed=4), naive.unanswered([4, 5, 6])]
OPTIONS = {"npo_beta": 0.3, "simnpo_beta": 2.0, "simnpo_delta": 0.1}


def model() -> CleanLM:
    return CleanLM(seed=3).double()


def targets() -> list[float]:
    """One sample far below its target, one within the margin, one at it, two beyond."""
    losses = [sum(own) / len(own) for own in (naive.token_losses(model(), s) for s in BATCH) if own]
    return [loss + gap for loss, gap in zip(losses, (3.0, 0.4, 0.0, -0.2, -5.0), strict=True)] + [0.0]


def context(net: CleanLM) -> LossContext:
    references = ReferenceLogProbs()
    references.compute(CleanLM(seed=9).double(), [naive.padded(BATCH, 14)])
    return LossContext(options=OPTIONS, reference_logprobs=references)


def gradient(net: CleanLM, loss: Tensor) -> Tensor:
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)])


def bounded(net: CleanLM, name: str, given: Tensor, **options: Any) -> tuple[Tensor, Depth, Tensor]:
    """What is raised, and what is lowered because it is beyond its target."""
    batch = naive.padded(BATCH, 14)
    depth = Depth(lambda _: given, 0.5, **options)
    gate = depth.gate(batch)
    with gate.on(net):
        loss = get_loss(name, "forget").function(net, batch, context(net))
    return loss, depth, returned(net, {**batch, GATE: gate}, LossContext())


@pytest.mark.parametrize("way", BEYOND)
@pytest.mark.parametrize("name", ["nll", "npo", "simnpo"])
def test_each_share_is_weighted_by_its_distance_from_the_target(name: str, way: str) -> None:
    """Against the samples one by one, unpadded; the value of the loss is that of the unbounded one.

    What is beyond its target and returns is lowered by its own negative log-likelihood, whatever the loss; what is
    reversed, by the loss itself.
    """
    net, returns = model(), way == "return"
    loss, depth, lowered = bounded(net, name, torch.tensor(targets(), dtype=torch.float64), beyond=way)
    expected = torch.zeros(sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    beyond, far = torch.zeros((), dtype=torch.float64), 0.0
    whole = 0.0
    for sample, target in zip(BATCH, targets(), strict=True):
        tokens = naive.token_losses(net, sample)
        if tokens:
            share = get_loss(name, "forget").function(
                net, naive.padded([sample], len(sample["input_ids"])), context(net)
            )
            weight = min(1.0, max(-1.0, (target - sum(tokens) / len(tokens)) / 0.5))
            expected += (weight if way == "reverse" else max(0.0, weight)) * gradient(net, share)
            whole += share.item()
            own = get_loss("nll", "forget").function(net, naive.padded([sample], 14), LossContext())
            beyond, far = beyond + (max(0.0, -weight) * own if returns else 0.0), far + max(0.0, -weight) / 5
    assert loss.item() == pytest.approx(whole, rel=1e-12)  # float64 sums in another order
    assert torch.allclose(gradient(net, loss), expected, rtol=1e-10, atol=1e-12)
    if returns:
        assert lowered.item() == pytest.approx(beyond.item(), rel=1e-12) and lowered.item() > 0.0
        assert torch.allclose(gradient(net, lowered), gradient(net, beyond), rtol=1e-10, atol=1e-12)
    logs = depth.logs(lambda values: values)
    assert logs.get("depth/beyond") == (None if way == "leave" else pytest.approx(far))
    assert logs["depth/reached"] == pytest.approx(3 / 5)
    assert logs["depth/target"] == pytest.approx(sum(targets()[:5]) / 5)
    assert depth.logs(lambda values: values) == {}


@pytest.mark.parametrize("way", BEYOND)
@pytest.mark.parametrize("whole", [False, True])
def test_single_tokens_have_targets_of_their_own(whole: bool, way: str) -> None:
    """With ``whole``, a token is raised only as far as its answer is below the mean of its tokens' targets, too, and
    lowered, where that is the way, only as far as its answer is above it."""
    returns = way == "return"
    net, batch = model(), naive.padded(BATCH, 14)
    given = torch.rand(len(BATCH), 13, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 8.0
    loss, depth, lowered = bounded(net, "nll", given, whole=whole, beyond=way)
    least = 0.0 if way == "leave" else -1.0
    logits = net(**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits
    expected, beyond = (torch.zeros((), dtype=torch.float64) for _ in range(2))
    shares, reached, answered = [], 0, 0
    for i, sample in enumerate(BATCH):
        places = [t for t, label in enumerate(sample["labels"]) if t > 0 and label != -100]
        tokens = [-logits[i, t - 1].log_softmax(-1)[sample["labels"][t]] for t in places]
        gaps = [float(given[i, t - 1]) - token.item() for t, token in zip(places, tokens, strict=True)]
        if whole and gaps:
            shares.append(min(1.0, max(least, sum(gaps) / len(gaps) / 0.5)))
        for token, gap in zip(tokens, gaps, strict=True):
            weight = min(1.0, max(least, gap / 0.5))
            if whole:
                weight = weight * abs(shares[-1]) if weight * shares[-1] > 0.0 else 0.0
            raised = weight if way == "reverse" else max(0.0, weight)
            expected, beyond = expected + raised * token, beyond + max(0.0, -weight) * token
            reached, answered = reached + (weight <= 0.0), answered + 1
    if whole:
        assert min(shares) <= 0.0 and any(0.0 < share <= 1.0 for share in shares)  # answers of both kinds
        assert (way != "leave") == (min(shares) < 0.0)
    assert torch.allclose(gradient(net, loss), gradient(net, expected), rtol=1e-10, atol=1e-12)
    if returns:
        assert torch.allclose(gradient(net, lowered), gradient(net, beyond), rtol=1e-10, atol=1e-12)
    assert depth.logs(lambda values: values)["depth/reached"] == pytest.approx(reached / answered)


def test_weights_stay_through_the_passes_of_a_step() -> None:
    """At w+δ a sample weighs what it weighed at w: moving the weights must not change what is being raised."""
    net, batch = model(), naive.padded(BATCH, 14)
    gate = Depth(lambda _: torch.tensor(targets()), 0.5).gate(batch)
    function = get_loss("nll", "forget").function
    with gate.on(net):
        function(net, batch, LossContext())
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.3)
    with gate.on(net):
        again = function(net, batch, LossContext())
    assert gate._weights is not None
    rows = [get_loss("nll", "forget").function(net, naive.padded([s], 14), LossContext()) for s in BATCH]
    expected = sum(
        float(w) * gradient(net, row) for w, row in zip(gate._weights, rows, strict=True) if row.requires_grad
    )
    assert isinstance(expected, Tensor)
    assert torch.allclose(gradient(net, again), expected, rtol=1e-6, atol=1e-9)


def test_second_derivatives_carry_the_weights() -> None:
    """Hessian products of the bounded loss are those of the weighted sum."""
    net = model()
    given = torch.tensor(targets(), dtype=torch.float64)
    loss, _, _ = bounded(net, "nll", given)
    losses = [naive.token_losses(net, sample) for sample in BATCH[:5]]
    gaps = [target - sum(own) / len(own) for target, own in zip(targets()[:5], losses, strict=True)]
    weights = [min(1.0, max(0.0, gap / 0.5)) for gap in gaps]
    rows = [get_loss("nll", "forget").function(net, naive.padded([s], 14), LossContext()) for s in BATCH[:5]]
    parameters = list(net.parameters())

    def product(value: Any) -> Tensor:
        first = torch.autograd.grad(value, parameters, create_graph=True)
        second = torch.autograd.grad(sum((g * g.detach()).sum() for g in first), parameters)
        return torch.cat([g.reshape(-1) for g in second])

    weighted = product(sum(w * row for w, row in zip(weights, rows, strict=True)))
    assert torch.allclose(product(loss), weighted, rtol=1e-9, atol=1e-12)


def test_other_rows_are_not_weighted() -> None:
    """A loss that also reads alternate answers has those unweighted."""
    net, batch, other = model(), naive.padded(BATCH, 14), naive.padded(samples(3, seed=8), 14)
    with Depth(lambda _: torch.full((6,), -1.0), 0.5).gate(batch).on(net):
        function = get_loss("nll", "forget").function
        forget, alternate = (function(net, b, LossContext()) for b in (batch, other))
    assert gradient(net, forget).abs().max() == 0.0
    assert torch.equal(gradient(net, alternate), gradient(net, function(net, other, LossContext())))


def test_a_loss_that_never_reads_the_logits_is_refused() -> None:
    net, batch = model(), naive.padded(BATCH, 14)
    with pytest.raises(ConfigError, match="forget_until"), Depth(lambda _: torch.zeros(6), 1.0).gate(batch).on(net):
        net.head.weight.square().sum()


@pytest.mark.parametrize(
    ("way", "levels", "expected"),
    [
        ("leave", (-1.0, 500.0, 250.0, -1.0), (0.0, 1.0, 0.5, 0.0)),
        ("return", (-1.0, 500.0, 250.0, -1.0), (0.0, 1.0, 0.5**0.5, 0.0)),
        ("reverse", (500.0, 250.0, -250.0, -1.0), (1.0, 0.5, 0.5, 0.0)),
    ],
)
def test_what_is_left_is_measured_by_the_first_step_that_had_any(
    way: str, levels: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    """A first window that is deep enough already must not switch everything after it off."""
    net, batch, level = model(), naive.padded(BATCH, 14), [0.0]
    depth = Depth(lambda _: torch.full((6,), level[0], dtype=torch.float64), 1e3, beyond=way)
    left = []
    for level[0] in levels:
        with depth.gate(batch).on(net):
            get_loss("nll", "forget").function(net, batch, LossContext())
        left.append(depth.remaining(lambda values: values))
        depth.logs(lambda values: values)
    assert left == pytest.approx(expected, abs=0.02)  # losses of about 4 against targets of hundreds
    assert all(value == 0.0 for value, truth in zip(left, expected, strict=True) if truth == 0.0 and way != "reverse")
