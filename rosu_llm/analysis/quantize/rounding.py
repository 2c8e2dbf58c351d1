"""Weights as they are after quantisation, and the bucket that each of them falls into.

Every matrix of a linear layer but the output layer is rounded, as transformers does when it loads a model in 4 or 8
bits; the result is put back in the layer's own precision. So a forward pass is that of weight-only quantisation. Where
a library would also round activations (LLM.int8), that is left out.

``rtn8`` and ``rtn4`` need no library. Round to nearest, per group of g weights of a row:

    s = max|w| / (2^(b−1) − 1)        q = round(w / s)        w' = s·q

``int8`` (per row), ``nf4`` and ``fp4`` (blocks of 64) are bitsandbytes' own, which runs on CPUs too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import ConfigError, unknown

ROUND_TO_NEAREST = {"rtn8": 8, "rtn4": 4}
LIBRARY = ("int8", "nf4", "fp4")
PRECISIONS = (*ROUND_TO_NEAREST, *LIBRARY)
FULL = "full"
BLOCK = 64  # bitsandbytes' default


class Rounded(NamedTuple):
    """A matrix after rounding: the weights in its own precision, and for each the number of its bucket."""

    weights: Tensor
    buckets: Tensor


def check_precisions(names: tuple[str, ...], group: int) -> None:
    """Raise for names that are not known, or that need a library which is not installed."""
    for name in names:
        if name not in PRECISIONS:
            raise unknown("precision", name, PRECISIONS)
    if group < 2:
        raise ConfigError(f"--group-size {group} is no group: give at least 2, e.g. 64.")
    needed = [name for name in names if name in LIBRARY]
    if needed and not has_library():
        raise ConfigError(
            f"--precisions {' '.join(needed)} needs bitsandbytes, which is not installed: pip install "
            "'rosu-llm[audit]', or take rtn8 and rtn4, which need nothing."
        )


def has_library() -> bool:
    """Whether bitsandbytes is installed."""
    return importlib.util.find_spec("bitsandbytes") is not None


def rounded(weight: Tensor, precision: str, group: int = BLOCK) -> Rounded:
    """One matrix, rounded; ``group`` is for rounding to nearest."""
    if precision in ROUND_TO_NEAREST:
        return _to_nearest(weight, ROUND_TO_NEAREST[precision], group)
    return _by_library(weight, precision)


def _to_nearest(weight: Tensor, bits: int, group: int) -> Rounded:
    rows, columns = weight.shape
    padded = nn.functional.pad(weight.float(), (0, -columns % group)).view(rows, -1, group)
    scale = padded.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    buckets = torch.where(scale > 0, (padded / scale).round(), torch.zeros_like(padded))
    values = (buckets * scale).view(rows, -1)[:, :columns]
    return Rounded(values.to(weight.dtype), buckets.to(torch.int8).view(rows, -1)[:, :columns])


def _by_library(weight: Tensor, precision: str) -> Rounded:
    from bitsandbytes import functional

    exact = weight.detach().contiguous()
    if precision == "int8":
        codes, largest, _ = functional.int8_vectorwise_quant(exact.half() if exact.dtype != torch.float16 else exact)
        values = codes.float() * largest.float().view(-1, 1) / 127.0
        return Rounded(values.to(weight.dtype), codes)
    packed, state = functional.quantize_4bit(exact, blocksize=BLOCK, quant_type=precision)
    values = functional.dequantize_4bit(packed, state)
    nibbles = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], 1).view(-1)
    return Rounded(values.to(weight.dtype), nibbles[: weight.numel()].view(weight.shape))


def linear_layers(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """The layers that are rounded: all linear ones but the output layer."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name, module


@torch.no_grad()
def round_model(model: Any, precision: str, group: int = BLOCK) -> int:
    """Round a model in place; returns how many weights that were."""
    count = 0
    for _, layer in linear_layers(model):
        layer.weight.copy_(rounded(layer.weight, precision, group).weights)
        count += layer.weight.numel()
    if not count:
        raise ConfigError(
            f"{type(model).__name__} has no linear layer beside its output layer: there is nothing to round."
        )
    return count


@torch.no_grad()
def compare_buckets(model: Any, initial: Any, precision: str, group: int = BLOCK) -> dict[str, float]:
    """How much of an update survives rounding.

    Returns:
        ``changed``: share of weights that differ from the initial model's; ``other_bucket``: share whose bucket does;
        ``update``: ‖w − w₀‖ / ‖w₀‖; ``surviving``: ‖Q(w) − Q(w₀)‖ / ‖w − w₀‖, 0 where nothing is left of the update.
    """
    count = changed = moved = 0
    before = after = size = 0.0
    others = dict(linear_layers(initial))
    for name, layer in linear_layers(model):
        mine, theirs = layer.weight, others[name].weight if name in others else None
        if theirs is None or theirs.shape != mine.shape:
            raise ConfigError(f"The initial model has no layer {name} of this shape: it is not the model's origin.")
        ours, first = rounded(mine, precision, group), rounded(theirs, precision, group)
        count += mine.numel()
        changed += int((mine != theirs).sum())
        moved += int((ours.buckets != first.buckets).sum())
        before += float((mine.double() - theirs.double()).square().sum())
        after += float((ours.weights.double() - first.weights.double()).square().sum())
        size += float(theirs.double().square().sum())
    return {
        "changed": changed / count,
        "other_bucket": moved / count,
        "update": (before / size) ** 0.5,
        "surviving": (after / before) ** 0.5 if before > 0 else 0.0,
    }
