"""A decoder's feed-forward blocks where a token is, and nowhere else.

A feed-forward block treats every position by itself, and holds most of a decoder's arithmetic. What it makes of padding
reaches no other token; what the last one makes of a position whose logits nobody asks for reaches nothing at all. So
each block sees the tokens that count, and the others get zeros from it: the numbers at answer positions are those of
the whole blocks to rounding, and so are the gradients.

Attention is left as it is. Blocks stay whole where they drop out at random (fewer tokens would draw other masks),
where backward runs the layers again (gradient checkpointing: by then another forward may have come), where somebody's
hook reads them, and in models whose blocks cannot be found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

#: Share of the positions that must be left out: below it, choosing tokens costs as much as it saves.
WORTHWHILE = 0.02


def feed_forwards(inner: Any) -> list[nn.Module]:
    """The feed-forward block of every layer, in order; none where one of them has to stay whole."""
    decoder = getattr(inner, str(getattr(inner, "base_model_prefix", "")), None)
    layers = getattr(decoder, "layers", None) or getattr(decoder, "h", None)
    if not isinstance(layers, nn.ModuleList):
        return []
    if getattr(inner, "is_gradient_checkpointing", False) and any(m.training for m in (inner, decoder, *layers)):
        return []
    # Its own: a wrapper that runs the layer again in backward shows those of what it wraps as well.
    found = [layer._modules.get("mlp") for layer in layers]
    blocks = [block for block in found if isinstance(block, nn.Module) and not _drops_out(block)]
    return blocks if len(blocks) == len(found) else []


def _drops_out(block: nn.Module) -> bool:
    return any(m.training and m.p > 0.0 for m in block.modules() if isinstance(m, nn.modules.dropout._DropoutNd))


@contextmanager
def thinned(blocks: Sequence[nn.Module], shape: torch.Size, present: Tensor | None, asked: Tensor) -> Iterator[None]:
    """Inside, the last block sees the tokens ``asked``, the others those ``present``.

    Args:
        shape: rows and columns of the batch.
        present, asked: flat positions, each once. None: all of them.
    """
    size = shape[0] * shape[1]
    with ExitStack() as stack:
        for i, block in enumerate(blocks):
            chosen = asked if i + 1 == len(blocks) else present
            if chosen is not None and len(chosen) < (1.0 - WORTHWHILE) * size:
                stack.enter_context(replaced_forward(block, partial(_chosen, block.forward, shape, chosen)))
        yield


@contextmanager
def replaced_forward(module: Any, forward: Any) -> Iterator[None]:
    """Another forward for a module; one that somebody has put there comes back."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _chosen(forward: Any, shape: torch.Size, chosen: Tensor, hidden: Tensor, *given: Any, **named: Any) -> Any:
    if given or named or hidden.shape[:2] != shape:
        return forward(hidden, *given, **named)
    flat = hidden.reshape(-1, hidden.shape[-1])
    made: Tensor = forward(flat.index_select(0, chosen).unsqueeze(0)).squeeze(0)
    whole = made.new_zeros(len(flat), made.shape[-1]).index_copy(0, chosen, made)
    return whole.view(*shape, made.shape[-1])
