"""Losses of hidden activations against sums written out over sequences, tokens and entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rosu_llm.errors import ConfigError
from rosu_llm.losses import COUNT, LOSSES, LossContext, get_loss
from rosu_llm.representation.losses import RepresentationContext, representation, rmu, unit_of

LENGTHS = (5, 2, 3)
WIDTH, HIDDEN = 5, 6


def batch(masked: bool = True) -> dict[str, Tensor]:
    mask = torch.tensor([[1] * n + [0] * (WIDTH - n) for n in LENGTHS])
    given = {"input_ids": torch.ones(len(LENGTHS), WIDTH, dtype=torch.long)}
    return {**given, "attention_mask": mask} if masked else given


def activations(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return (torch.randn(len(LENGTHS), WIDTH, HIDDEN) * 2).to(dtype), torch.randn(len(LENGTHS), WIDTH, HIDDEN).to(dtype)


def context(pair: tuple[Tensor, Tensor], **settings: Any) -> LossContext:
    return LossContext(representation=RepresentationContext(activations=lambda _: pair, **settings))


def by_hand(residual: Tensor, reduction: str, lengths: tuple[int, ...]) -> float:
    """The mean, entry by entry."""
    total = 0.0
    for b, length in enumerate(lengths):
        for t in range(length):
            for h in range(HIDDEN):
                total += float(residual[b, t, h]) ** 2
    count = {"token_mean": 2 * sum(lengths), "paper": 2 * len(lengths), "rmu": sum(lengths) * HIDDEN}[reduction]
    return total / count


@pytest.mark.parametrize("mask_padding", [True, False])
@pytest.mark.parametrize("reduction", ["token_mean", "paper", "rmu"])
def test_a_sum_over_its_count_is_the_mean(reduction: str, mask_padding: bool) -> None:
    pair = activations()
    lengths = LENGTHS if mask_padding else (WIDTH,) * 3
    count = float(COUNT[unit_of(reduction, mask_padding)](batch()))
    sigma = torch.linspace(-1, 1, HIDDEN)
    settings: dict[str, Any] = {"reduction": reduction, "mask_padding": mask_padding}
    retain = representation(nn.Identity(), batch(), context(pair, **settings))
    forget = representation(nn.Identity(), batch(), context(pair, noise=lambda _: sigma, **settings))
    steered = rmu(nn.Identity(), batch(), context(pair, control=lambda *_: sigma, **settings))
    difference = pair[0].double() - pair[1].double()
    assert float(retain) / count == pytest.approx(by_hand(difference, reduction, lengths), rel=1e-6)
    assert float(forget) / count == pytest.approx(by_hand(difference + sigma, reduction, lengths), rel=1e-6)
    assert float(steered) / count == pytest.approx(-by_hand(pair[0].double() - sigma, reduction, lengths), rel=1e-6)


@pytest.mark.parametrize("reduction", ["token_mean", "paper", "rmu"])
def test_without_a_mask_every_token_counts(reduction: str) -> None:
    pair = activations()
    count = float(COUNT[unit_of(reduction, True)](batch(masked=False)))
    value = float(representation(nn.Identity(), batch(masked=False), context(pair, reduction=reduction)))
    expected = by_hand(pair[0].double() - pair[1].double(), reduction, (WIDTH,) * 3)
    assert value / count == pytest.approx(expected, rel=1e-6)


def test_arithmetic_is_float32_whatever_the_model_computes_in() -> None:
    """bf16 near 1 has steps of 2⁻⁷: h + σ would be h again, and the loss zero."""
    ones = torch.ones(1, 1, HIDDEN, dtype=torch.bfloat16)
    sigma = torch.full((HIDDEN,), 1e-3)
    given = context((ones, ones.clone()), noise=lambda like: sigma.to(like.dtype))
    value = representation(nn.Identity(), {"input_ids": torch.ones(1, 1)}, given)
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(0.5 * HIDDEN * 1e-6, rel=1e-6)
    assert bool((ones + sigma.to(torch.bfloat16) == ones).all())


def test_activations_are_widened_before_they_are_subtracted() -> None:
    """1 − 2⁻⁹ has nine digits, bf16 eight: subtracted there, it is 1."""
    current = torch.ones(1, 1, HIDDEN, dtype=torch.bfloat16)
    initial = torch.full_like(current, 2.0**-9)
    value = representation(nn.Identity(), {"input_ids": torch.ones(1, 1)}, context((current, initial)))
    assert float(value) == pytest.approx(0.5 * HIDDEN * (1 - 2.0**-9) ** 2, rel=1e-6)
    assert bool((current - initial == current).all())


def test_masked_positions_get_no_gradient() -> None:
    current, initial = activations()
    current.requires_grad_()
    representation(nn.Identity(), batch(), context((current, initial))).backward()
    assert current.grad is not None
    expected = (current - initial).detach() * batch()["attention_mask"].unsqueeze(-1)
    assert torch.allclose(current.grad, expected)


def test_roles_and_units() -> None:
    assert get_loss("representation", "forget").reference == get_loss("rmu", "forget").reference == "activations"
    assert {name for name, spec in LOSSES.items() if spec.reference == "activations"} == {"representation", "rmu"}
    with pytest.raises(ConfigError, match="cannot work as a retain loss"):
        get_loss("rmu", "retain")
    with pytest.raises(ConfigError, match="Did you mean 'token_mean'"):
        unit_of("token_men", True)


def test_a_trainer_without_a_layer_says_which_one_has_it() -> None:
    with pytest.raises(ConfigError, match="use RepresentationTrainer"):
        representation(nn.Identity(), batch(), LossContext())
