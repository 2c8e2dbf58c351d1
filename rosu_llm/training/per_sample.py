"""Single retain samples of a window, for rules that protect per-sample gradients.

Which k samples are taken is a function of seed and step alone, over the whole window: all micro-batches of all ranks,
in the order in which one process would have seen them. So 8×1 micro-batches, 1×8 and two processes choose the same.

Each sample is one batch-1 pass, and its gradient a stored copy; their Gram matrix needs all k at once. The rank that
has the sample returns its loss times the number of ranks, the others a loss times zero: whatever averages gradients
over ranks (DDP, FSDP2, ZeRO) then gives exactly that sample's gradient, and every collective is joined by all.

Why copies: the alternative keeps none, takes ⟨rᵢ, x⟩ by forward-mode derivatives and recomputes each rⱼ. For k = 8 on a
Llama of 7 M parameters (one CPU core, scripts/bench_per_sample.py) the copies cost 1.6 passes over the k samples, the
derivatives 18; those also need kernels that can be differentiated forwards. With an adapter or a few matrices the
copies are small; with all parameters they are k times the weights, divided by the ranks under FSDP2 and ZeRO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import DataError
from ..losses import COUNT
from ..losses.language import ALTERNATE, IGNORE
from ..step import Closure
from .ranks import Ranks
from .window import WindowLoss

#: What the units of a batch are counted from.
_COUNTED = ("input_ids", "attention_mask", "labels")


def sample_closures(
    loss: WindowLoss,
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    ranks: Ranks,
    *,
    count: int,
    longest: int,
    seed: int,
    step: int,
    required: bool = True,
) -> list[Closure]:
    """One closure for each of up to ``count`` samples; averaged over ranks it is that sample's mean loss.

    ``longest`` is the number of micro-batches of the longest window over ranks. ``required``: a window without a
    sample that has an answer is an error.
    """
    units = COUNT[loss.spec.unit]
    near = [{name: b[name].cpu() for name in _COUNTED if name in b} for b in batches]  # what is asked row by row
    # A sample without answer tokens has no gradient to protect.
    rows = [[i for i in range(len(b[_sized(b)])) if float(units(single(b, i))) > 0.0] for b in near]
    sizes = torch.zeros(longest, dtype=torch.float64)
    sizes[: len(rows)] = torch.tensor([float(len(found)) for found in rows])
    table = ranks.gather(sizes).round().to(torch.int64).tolist()
    places = choose(table, count, seed, step)
    if not places and required:
        raise DataError("The retain window has no sample with an answer token: check label masking and max_length.")
    closures = []
    for rank, micro, nth in places:
        mine = rank == ranks.rank
        micro, row = (micro, rows[micro][nth]) if mine else (-1, 0)
        sample = single(batches[micro], row, end_of(near[micro], row))
        weight = ranks.world / float(units(single(near[micro], row))) if mine else 0.0
        closures.append(loss.share(model, sample, weight))
    return closures


def choose(sizes: Sequence[Sequence[int]], count: int, seed: int, step: int) -> list[tuple[int, int, int]]:
    """Up to ``count`` distinct places (rank, micro-batch, row), from how many rows each micro-batch of each rank has.

    Micro-batch m of all ranks comes before micro-batch m+1 of any: that is how a data loader deals them out.
    """
    places = [
        (rank, micro, row)
        for micro in range(max(map(len, sizes)))
        for rank in range(len(sizes))
        for row in range(sizes[rank][micro])
    ]
    order = np.random.default_rng([abs(seed), step]).permutation(len(places))
    return [places[i] for i in order[:count]]


def end_of(batch: Mapping[str, Any], row: int) -> int:
    """Where the padding behind a sample begins.

    A last token that is not attended to but is predicted belongs to the sample: the end of text, where it is the pad
    token as well.
    """
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if "input_ids" not in batch:
        return 0  # nothing is padded
    if mask is None or mask.dim() != 2 or not bool(mask[row].any()):
        return int(batch["input_ids"].shape[1])
    used = mask[row].bool() if labels is None else mask[row].bool() | (labels[row] != IGNORE)
    return int(used.nonzero().max()) + 1


def _sized(batch: Mapping[str, Any]) -> str:
    """The key of something with a row per sample."""
    return "input_ids" if "input_ids" in batch else "labels"


def single(batch: Mapping[str, Any], row: int, end: int | None = None) -> dict[str, Any]:
    """One sample of a collated batch, without the padding behind it (from ``end`` on, if that is known).

    Padding in front stays: without explicit positions, taking it away would shift those of the tokens.
    """
    rows, length = batch["input_ids"].shape[:2] if "input_ids" in batch else (len(batch["labels"]), None)
    end = end_of(batch, row) if end is None else end
    sample: dict[str, Any] = {}
    for name, value in batch.items():
        if name == ALTERNATE:
            value = single(value, row)
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows:
            value = value[row : row + 1]
            if value.dim() > 1 and value.shape[1] == length:
                value = value[:, :end]
        sample[name] = value
    return sample
