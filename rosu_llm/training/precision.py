"""Trainable weights in float32, because bfloat16 cannot hold a perturbation.

A bf16 weight has 8 bits of mantissa; δ, spread over millions of weights, is far below its last bit and
rounds away. Compute in bf16 through autocast, keep the weights in float32.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from ..errors import ConfigError
from ..space import trainable

logger = logging.getLogger(__name__)


def prepare_precision(model: nn.Module, *, upcast: bool, autocast: bool) -> int:
    """Upcast bf16 trainable weights in place; returns the bytes that costs.

    Raises where there is nothing to train, where weights are float16, and where float32 weights would
    meet bf16 activations without autocast.
    """
    parameters = trainable(model.parameters())
    low = [p for p in parameters if p.dtype == torch.bfloat16]
    wide = upcast or len(low) < len(parameters)
    frozen_low = any(p.dtype == torch.bfloat16 for p in model.parameters() if not p.requires_grad)
    adapters = hasattr(model, "peft_config")  # peft casts activations to the adapter's type by itself
    if frozen_low and wide and not autocast and not adapters:
        raise ConfigError(
            "Part of the model is frozen in bfloat16 and the trainable part must be float32 (bf16 would round the "
            "perturbation away); the two cannot be multiplied without autocast. Set bf16=True."
        )
    if not low or not upcast:
        return 0
    extra = 2 * sum(p.numel() for p in low)
    for p in low:
        p.data = p.data.float()
    logger.warning(
        "Trainable weights were bfloat16 and are now float32 (+%.2f GiB): perturbing bf16 weights rounds most of "
        "the perturbation away. %sSet upcast=False to keep them as they are.",
        extra / 2**30,
        "" if autocast else "Set bf16=True to go on computing in bf16. ",
    )
    return extra
