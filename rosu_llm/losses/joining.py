"""A batch as one row without padding (``padding_free``).

Samples stand one behind the other, and each one's positions begin at zero again. Attention that reads position ids
keeps them apart: FlashAttention computes every sample by itself (its kernels for sequences of varying length), SDPA and
eager attention of current transformers mask what belongs to another sample. Older versions do not, so a model is tried
first.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import ConfigError

#: Models that were found to keep samples apart.
_TRIED: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def joined(inner: Any, inputs: Mapping[str, Any], present: Tensor) -> dict[str, Any]:
    """The arguments of the model ``inner`` for the flat positions ``present``, no padding, in their order."""
    shape = inputs["input_ids"].shape
    result: dict[str, Any] = {"position_ids": (present % shape[1]).unsqueeze(0)}
    kind: Any = type(inner)
    if _caches(kind):  # with a cache transformers does not look where positions begin again
        result["use_cache"] = False
    for name, value in inputs.items():
        if name == "attention_mask":
            continue
        if isinstance(value, Tensor) and value.shape != shape:
            raise ConfigError(
                f"padding_free=True cannot put {name!r} of shape {tuple(value.shape)} into one row: it has no value "
                "per token. Leave padding_free out."
            )
        chosen = value.reshape(-1).index_select(0, present).unsqueeze(0) if isinstance(value, Tensor) else value
        result[name] = chosen
    return result


@lru_cache(maxsize=64)
def _caches(kind: Any) -> bool:
    return "use_cache" in inspect.signature(kind.forward).parameters


def places(present: Tensor, flat: Tensor, size: int) -> Tensor:
    """Where the flat positions of a batch of ``size`` stand in its row."""
    lookup = torch.zeros(size, dtype=torch.int64, device=present.device)
    lookup[present] = torch.arange(len(present), device=present.device)
    return lookup[flat]


@torch.no_grad()
def check_kept_apart(model: nn.Module, inner: Any, inputs: Mapping[str, Any], present: Tensor) -> None:
    """Raise for a model that lets a sample see those before it in its row; found out at its first batch.

    Two passes, whatever the batch: under sharding every process has to make as many.
    """
    if inner in _TRIED:
        return
    length = inputs["input_ids"].shape[1]
    first, second = present[present < length], present[(present >= length) & (present < 2 * length)]
    second = second if len(second) else first  # a single sample follows itself
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        rows = (torch.cat([first, second]), second)
        both, alone = (model(**joined(inner, inputs, part)).logits[0, -len(second) :] for part in rows)
    finally:
        for module in training:
            module.training = True
    size = float(alone.abs().max())
    if float((both - alone).abs().max()) > torch.finfo(alone.dtype).eps ** 0.5 * size:
        import transformers

        kind = getattr(getattr(inner, "config", None), "_attn_implementation", None)
        raise ConfigError(
            f"padding_free=True: {type(inner).__name__} with attn_implementation={kind!r} and transformers "
            f"{transformers.__version__} lets samples of one row see each other. Load it with "
            "attn_implementation='flash_attention_2' or a newer transformers, or leave padding_free out."
        )
    _TRIED[inner] = True
