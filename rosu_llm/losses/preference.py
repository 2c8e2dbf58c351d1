"""Losses with a third answer: what the model is to say in place of the answer that is forgotten.

A forget batch holds it under ``alternate``, as a batch with the same number of rows and ``input_ids``,
``attention_mask`` and ``labels`` of its own.

* ``idk_nll`` (Maini et al., "TOFU", 2024): the likelihood of a refusal, nothing else.
* ``idk_dpo`` (the same; Zhang et al., 2024) and ``altpo`` (Mekala et al., "Alternate Preference Optimization", 2024)
  minimise −(2/β) log σ(β(Δ(alternate) − Δ(answer))), Δ = log π(·|question) − log π₀(·|question), summed over tokens,
  β = .1. They differ in the third answer: a refusal, or another plausible answer.

Both answers of a sample go through the model in one pass: layouts that shard weights count forwards.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from .language import IGNORE, POSITIONS, Positions, alternate_of, answer_mask, answer_nll
from .registry import Batch, LossContext, register_loss


@register_loss("idk_nll", unit="alternate", roles=("forget",), alternative="refusals")
def idk_nll(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Minus the negative log-likelihood of the refusals' tokens."""
    return -answer_nll(model, alternate_of(batch)).sum()


@register_loss(
    "idk_dpo", unit="sequence", roles=("forget",), reference="logprobs", alternative="refusals", dpo_beta=0.1
)
def idk_dpo(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Minus the DPO objective that prefers a refusal to the answer."""
    return _preferred(model, batch, context)


@register_loss(
    "altpo", unit="sequence", roles=("forget",), reference="logprobs", alternative="alternates", dpo_beta=0.1
)
def altpo(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Minus the DPO objective that prefers another plausible answer to the answer."""
    return _preferred(model, batch, context)


def _preferred(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """(2/β) Σ log σ(β(Δ(alternate) − Δ(answer))) over sequences that have both."""
    assert context.reference_logprobs is not None
    beta, alternate, count = context.options["dpo_beta"], alternate_of(batch), len(batch["input_ids"])
    losses = answer_nll(model, stacked(batch, alternate))
    both = -losses.sum(-1)
    ratios = both - torch.cat([context.reference_logprobs(batch), context.reference_logprobs(alternate)])
    margin = ratios[count:] - ratios[:count]
    if context.gate is not None:
        context.gate.weigh_rows(margin, losses[:count])
    present = answer_mask(batch["labels"]).any(-1) & answer_mask(alternate["labels"]).any(-1)
    return (2.0 / beta) * (functional.logsigmoid(beta * margin) * present).sum()


def stacked(first: Batch, second: Batch) -> dict[str, Tensor]:
    """One batch with the rows of both, the first's before the second's, filled up on the right."""
    width = max(first["input_ids"].shape[1], second["input_ids"].shape[1])
    result: dict[str, Tensor] = {}
    for name, fill in (("input_ids", 0), ("attention_mask", 0), ("labels", IGNORE)):
        parts = []
        for batch in (first, second):
            value = batch[name] if name in batch else torch.ones_like(batch["input_ids"])
            parts.append(functional.pad(value, (0, width - value.shape[1]), value=fill))
        result[name] = torch.cat(parts)
    if POSITIONS in first and POSITIONS in second:
        return {**result, POSITIONS: _stacked_positions(first, second, width)}  # type: ignore[dict-item]
    return result


def _stacked_positions(first: Batch, second: Batch, width: int) -> Positions:
    a, b, count = first[POSITIONS], second[POSITIONS], len(first["input_ids"])
    present = None
    if a.present is not None and b.present is not None:
        own, other = first["input_ids"].shape[1], second["input_ids"].shape[1]
        present = torch.cat(
            [
                a.present // own * width + a.present % own,
                (count + b.present // other) * width + b.present % other,
            ]
        )
    return Positions(
        torch.cat([a.rows, b.rows + count]),
        torch.cat([a.columns, b.columns]),
        a.tokens + b.tokens,
        a.sequences + b.sequences,
        present,
        a.join and b.join,
    )
