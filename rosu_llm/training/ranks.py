"""This process among the others: what it measures for all of them, and what they tell it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """Where this process is among the others.

    Attributes:
        rank, world: its number, and how many there are.
        mean: averages a small tensor over processes.
    """

    rank: int
    world: int
    mean: Callable[[Tensor], Tensor]

    def gather(self, values: Tensor) -> Tensor:
        """Row i is what rank i gave."""
        rows = torch.zeros(self.world, len(values), dtype=torch.float64)
        rows[self.rank] = values * self.world
        return self.mean(rows)

    def share(self, items: Sequence[Item]) -> Iterator[tuple[Item, bool]]:
        """Every world-th item, and whether it is this rank's own.

        Where items do not divide, a rank gets the last one once more: a forward pass may be a collective (sharded
        weights, DDP's buffers), so every rank takes part in the same number of them.
        """
        for first in range(0, len(items), self.world):
            own = first + self.rank < len(items)
            yield items[first + self.rank if own else -1], own

    def merge(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """What all ranks have found, by key."""
        if self.world == 1:
            return dict(values)
        everyone: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(everyone, dict(values))
        return {key: value for found in everyone for key, value in found.items()}
