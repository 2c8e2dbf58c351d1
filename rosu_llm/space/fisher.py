"""Squared gradients summed over samples, and weights dampened by them, in whatever layout the space has.

Both go element by element: a process works on the tensors it owns, and only three counts are summed over processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import NonFiniteError
from ..geometry.slots import FISHER
from .base import ParameterSpace
from .blocks import Sums, blocks, work_dtype

#: Values of α whose selections are counted, for whoever has to choose another.
ALPHAS = (0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)


@dataclass(frozen=True)
class Dampened:
    """What dampening does: to how many of the weights with forget information, and how much of those it leaves.

    Attributes:
        selected: weights with F_f > α F_r.
        informed: weights with F_f > 0.
        kept: mean of min(1, λ F_r/F_f) over the selected.
        others: how many other values of α would select.
    """

    selected: int
    informed: int
    kept: float
    others: Mapping[float, int]


@torch.no_grad()
def add_square(space: ParameterSpace, name: str) -> None:
    """Add the square of the accumulated gradient to the sums ``name`` of the space's memory, and clear it."""
    gradients, weights = space._gradients(), space._master()
    if name not in space.memory:
        space.memory[name] = [torch.zeros_like(w, dtype=work_dtype(w, precise=False)) for w in weights]
    for total, gradient in zip(space.memory[name], gradients, strict=True):
        if gradient is not None:
            for into, piece in blocks(total, gradient):
                wide = piece.to(into.dtype)
                into.addcmul_(wide, wide)
    space._clear_gradients()


def measure(space: ParameterSpace, counts: Mapping[str, int], alpha: float, scale: float) -> Dampened:
    """What :func:`dampen` would do; ``counts`` are the squares summed in each part, ``scale`` is λ."""
    sums = Sums(4 + len(ALPHAS))
    for _, forget, retain in _informed(space, counts):
        chosen = forget > alpha * retain
        factor = (scale * retain / forget).clamp(max=1.0)
        found = [chosen, forget > 0.0, torch.where(chosen, factor, 0.0), ~torch.isfinite(forget + retain)]
        found += [forget > other * retain for other in ALPHAS]
        sums.add(*(value.sum().to(work_dtype(forget, precise=True)) for value in found))
    selected, informed, kept, broken, *others = space._sum_over_shards(sums.total()).tolist()
    if broken:
        raise NonFiniteError(
            f"{broken:.0f} squared gradients are NaN or infinite; the weights were left as they were. Compute in "
            "float32 or bf16, and check the data."
        )
    known = {other: round(count) for other, count in zip(ALPHAS, others, strict=True)}
    return Dampened(round(selected), round(informed), kept / max(selected, 1.0), known)


@torch.no_grad()
def dampen(space: ParameterSpace, counts: Mapping[str, int], alpha: float, scale: float) -> None:
    """w ← w·min(1, λ F_r/F_f) where F_f > α F_r."""
    for weight, forget, retain in _informed(space, counts):
        factor = torch.where(forget > alpha * retain, (scale * retain / forget).clamp(max=1.0), 1.0)
        weight.copy_(weight.to(factor.dtype) * factor)
    space.weights_changed()


def _informed(space: ParameterSpace, counts: Mapping[str, int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Matching blocks of the weights and of both means."""
    forget, retain = (space.memory[FISHER[part]] for part in ("forget", "retain"))
    for group in zip(space._master(), forget, retain, strict=True):
        for w, f, r in blocks(*group):
            yield w, f / counts["forget"], r / counts["retain"]
