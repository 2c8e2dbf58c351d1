"""Gradients of mini-batches, recomputed for every pair: any model size, any layout.

Held at a time: the full retain gradient, that of the pair's forget batch and of its retain batch. Mini-batches are
normalised as a training window is: the sum over their units (answer tokens) over the number of those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...errors import DataError
from ...geometry import Gram
from ...space import ParameterSpace
from .pairs import G, Indices, check_full

Progress = Callable[[str, int, int], None]


class PairSource(Protocol):
    """Where the inner products of a pair come from."""

    @property
    def full_norm(self) -> float:
        """‖g‖ of the full retain gradient."""

    def gram(self, forget: Indices, retain: Indices) -> Gram:
        """Inner products of ``g``, ``f`` and ``r``."""


@dataclass(frozen=True)
class Part:
    """The forget or the retain set.

    Attributes:
        units: of every sample, what its loss is a sum over (answer tokens, for most losses).
        loss: the summed loss of the samples with these numbers.
    """

    units: NDArray[np.float64]
    loss: Callable[[Sequence[int]], Tensor]

    def __len__(self) -> int:
        return len(self.units)


def usable(name: str, samples: Any, units: Sequence[float]) -> list[Any]:
    """The samples with at least one unit; those without have no gradient."""
    kept = [sample for sample, count in zip(samples, units, strict=True) if count > 0]
    if not kept:
        raise DataError(
            f"No {name} sample has an answer token, so there is no gradient to audit: check the data and max_length."
        )
    return kept


class Recomputed:
    """A :class:`PairSource` that runs two passes per pair.

    Args:
        space: owner of parameters and gradients.
        parts: ``forget`` and ``retain``.
        micro_batch: samples per forward pass.
        rank, world: this process among those that share every batch.
    """

    def __init__(
        self, space: ParameterSpace, parts: Mapping[str, Part], *, micro_batch: int, rank: int = 0, world: int = 1
    ) -> None:
        self._space, self._parts, self._micro = space, parts, micro_batch
        self._rank, self._world = rank, world
        self.full_norm = 0.0

    def stream_full(self, progress: Progress) -> None:
        """One pass over the retain set, whose gradient is kept."""
        self._space.begin()
        self._capture("g", "retain", np.arange(len(self._parts["retain"])), progress)
        self.full_norm = self._space.gram(["g"]).norm(G)
        check_full(self.full_norm)

    def gram(self, forget: Indices, retain: Indices) -> Gram:
        self.capture_pair(forget, retain)
        return self._space.gram(["g", "f", "r"])

    def capture_pair(self, forget: Indices, retain: Indices) -> None:
        """The gradients of both batches, as ``f`` and ``r`` in the space."""
        self._capture("f", "forget", forget)
        self._capture("r", "retain", retain)

    def _capture(self, name: str, part: str, indices: Indices, progress: Progress | None = None) -> None:
        data = self._parts[part]
        total = float(data.units[indices].sum())
        mine = indices[self._rank :: self._world].tolist()
        rounds = ceil(ceil(len(indices) / self._world) / self._micro)
        for i in range(rounds):
            chunk = mine[i * self._micro : (i + 1) * self._micro]
            # Gradients are averaged over processes; one without a sample left still joins the collectives.
            weight = self._world / total if chunk else 0.0
            with self._space.micro_batch(last=i + 1 == rounds):
                self._space.backward(data.loss(chunk or indices[:1].tolist()) * weight)
            if progress is not None:
                progress("full retain gradient", i + 1, rounds)
        self._space.capture(name)
