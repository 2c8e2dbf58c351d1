"""Distillation from the initial model with the answer made unlikely.

UNDIAL (Dong et al., "UNDIAL: Self-Distillation with Adjusted Logits for Robust Unlearning", 2024) minimises, at every
position that predicts an answer token y,

    −Σ_v q_v log p_v,   q = softmax(z₀ − β·onehot(y)),

where z₀ are the initial model's logits, p the current probabilities and β = 10. The target q does not change during
the run, so forgetting ends by itself. z₀ comes from hidden states that are kept once, or from the model without its
adapter, as for ``retain_loss: kl``. OpenUnlearning's version takes the mean over all positions, prompt and padding
among them (there the label −100 lowers the logit of the 100th-last token); here only answer positions count.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .language import answer_values, initial_logits
from .registry import Batch, LossContext, register_loss


@register_loss("undial", roles=("forget",), reference="distributions", undial_beta=10.0)
def undial(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Minus the cross-entropy against the initial model's distribution with the answer's logit lowered by β."""
    beta = context.options["undial_beta"]
    initial = initial_logits(batch, context)

    def against_lowered(logits: Tensor, tokens: Tensor, at: slice) -> Tensor:
        with torch.no_grad():
            lowered = initial(at).clone()
            lowered[torch.arange(len(tokens), device=tokens.device), tokens] -= beta
            target = lowered.softmax(-1)
        return -(target * logits.log_softmax(-1)).sum(-1)

    return -answer_values(model, batch, against_lowered, context)[0].sum()
