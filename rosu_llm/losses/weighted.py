"""Gradient ascent with a weight per answer token: what is unlikely already is raised less.

The weight depends on p, the probability of the token now, and is taken without gradient. Published as something to
minimise, −w(p)·CE; L_f is raised, so w(p)·CE stands here.

* ``wga`` (Wang et al., "Rethinking LLM Unlearning Objectives", 2025): w = p^β, β = 1.
* ``satimp`` (Yang et al., "Exploring Criteria of Loss Reweighting to Enhance LLM Unlearning", 2025):
  w = p^β₁ (1 − p)^β₂, β₁ = 5 (saturation) and β₂ = 1 (importance).
"""

from __future__ import annotations

from torch import Tensor, nn

from .language import answer_nll
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
