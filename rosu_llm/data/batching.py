"""Which samples share a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def plan_batches(
    lengths: Sequence[int], *, batch_size: int, batch_tokens: int, order: Sequence[Any] = ()
) -> list[list[int]]:
    """Batches of sample numbers, longest first, each of at most ``batch_size`` samples and ``batch_tokens`` tokens.

    Tokens are counted with padding; a sample that is longer than the budget gets a batch of its own. ``order``
    replaces the length as what samples are sorted by.
    """
    keys = order or lengths
    batches: list[list[int]] = []
    widest = 0
    for at in sorted(range(len(lengths)), key=lambda at: keys[at], reverse=True):
        grown = max(widest, lengths[at])
        if batches and len(batches[-1]) < batch_size and grown * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(at)
            widest = grown
        else:
            batches.append([at])
            widest = lengths[at]
    return batches
