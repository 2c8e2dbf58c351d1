"""Gradient ascent with a weight per answer token, which depends on p, the probability of the token now.

Published with weights that are taken without gradient, as something to minimise, −w(p)·CE; L_f is raised, so w(p)·CE
stands here:

* ``wga`` (Wang et al., "Rethinking LLM Unlearning Objectives", 2025): w = p^β, β = 1.
* ``satimp`` (Yang et al., "Exploring Criteria of Loss Reweighting to Enhance LLM Unlearning", 2025):
  w = p^β₁ (1 − p)^β₂, β₁ = 5 (saturation) and β₂ = 1 (importance).

Ours, ``odds``, is the other way round. The gradient of −log p fades with 1 − p: a token that is known by heart hardly
moves while those that have begun to go are pushed on, so some facts stay and others go too far. The gradient of the
odds against the token is that of −log p over 1 − p, so all up to p = .99 move alike, and those beyond 100 times as much
as otherwise. It is meant for bounded forgetting.
"""

from __future__ import annotations

from math import log, log1p

import torch
from torch import Tensor, nn

from .language import answer_mask, answer_nll
from .registry import Batch, LossContext, register_loss


@register_loss("wga", roles=("forget",), wga_beta=1.0)
def wga(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Σ p^β·(−log p) over answer tokens."""
    found = answer_nll(model, batch, context)
    return ((-context.options["wga_beta"] * found.detach()).exp() * found).sum()


@register_loss("satimp", roles=("forget",), satimp_beta1=5.0, satimp_beta2=1.0)
def satimp(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Σ p^β₁ (1 − p)^β₂·(−log p) over answer tokens."""
    found = answer_nll(model, batch, context)
    now = found.detach()
    saturation = (-context.options["satimp_beta1"] * now).exp()
    importance = (-(-now).expm1()) ** context.options["satimp_beta2"]  # 1 − p without cancellation where p is near 1
    return (saturation * importance * found).sum()


#: Where 1 − p is less, the odds go on in a straight line in −log p: their slope is at most 100 times that of −log p.
_LEAST = 0.01


@register_loss("odds", roles=("forget",))
def odds(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Σ log((1 − p)/p) over answer tokens; beyond p = .99 along its tangent there."""
    found = answer_nll(model, batch, context)
    other = -(-found).expm1()  # 1 − p without cancellation where p is near 1
    curved = found + other.clamp(min=_LEAST).log()
    edge = -log1p(-_LEAST)
    straight = edge + log(_LEAST) + (found - edge) / _LEAST
    return (torch.where(other < _LEAST, straight, curved) * answer_mask(batch["labels"])).sum()
