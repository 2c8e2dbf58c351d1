"""The mini-batch pairs of a diagnosis: how many of which size, at which radii, and their samples as closures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError, DataError
from ...step import Closure
from ...training.window import PARTS, WindowLoss

#: Radii around the paper's choice for language models, ρ = 0.4.
RHOS = (0.1, 0.2, 0.4, 0.8)


@dataclass(frozen=True, kw_only=True)
class CouplingPlan:
    """What is measured.

    Args:
        pairs: number of mini-batch pairs.
        forget_batch_size, retain_batch_size: samples per batch, over all processes.
        micro_batch_size: samples per forward pass and process; None takes a batch at once.
        rhos: radii with a row of their own in the result.
        rho: the radius the advice is about; the largest of ``rhos`` if None.
        full_batch: also measure all samples at once, and cos θ for batches that grow up to them.
        points: number of further, evenly spaced radii up to the largest at which losses are measured.
        seed: of the draws.
    """

    pairs: int = 16
    forget_batch_size: int = 8
    retain_batch_size: int = 8
    micro_batch_size: int | None = None
    rhos: tuple[float, ...] = RHOS
    rho: float | None = None
    points: int = 8
    full_batch: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("pairs", "forget_batch_size", "retain_batch_size", "micro_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.")
        if self.points < 0:
            raise ConfigError(f"points={self.points} must be at least 0 (then only the radii in rhos are measured).")
        if not self.rhos:
            raise ConfigError("rhos is empty: give at least one radius, e.g. 0.4.")
        for rho in self.rhos if self.rho is None else (*self.rhos, self.rho):
            if not (rho > 0.0 and isfinite(rho)):
                raise ConfigError(f"rho={rho!r} is no radius of a perturbation: give positive numbers, e.g. 0.1 0.4.")

    @property
    def chosen(self) -> float:
        """The radius the advice is about."""
        return max(self.rhos) if self.rho is None else self.rho

    @property
    def reported(self) -> list[float]:
        """The radii with a row of their own, ascending."""
        return sorted({*self.rhos, self.chosen})

    @property
    def measured(self) -> list[float]:
        """All radii at which losses are measured, ascending."""
        highest = self.reported[-1]
        even = [highest * i / self.points for i in range(1, self.points + 1)]
        # An evenly spaced radius that equals a reported one up to rounding (0.1·3/3) is not measured twice.
        return sorted({*self.reported, *(x for x in even if all(abs(x - y) > 1e-9 * highest for y in self.reported))})

    def batch_size(self, part: str) -> int:
        """Samples per batch of ``forget`` or ``retain``."""
        return self.forget_batch_size if part == "forget" else self.retain_batch_size


@dataclass(frozen=True)
class PairWindows:
    """Draws seeded pairs and turns them into closures: the same samples whatever the number of processes.

    The samples of pair k are the first ones of a permutation that depends on (seed, part, k) alone; process p takes
    every ``world``-th of them from p on.

    Args:
        samples: the two data sets, with length and index.
        losses: the loss of each part.
        collate: samples → batch.
        prepare: puts a batch on the device.
    """

    model: nn.Module
    samples: Mapping[str, Any]
    losses: Mapping[str, WindowLoss]
    plan: CouplingPlan
    collate: Callable[[Sequence[Any]], Any]
    prepare: Callable[[Any], Any]
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        for part in PARTS:
            count, size = len(self.samples[part]), self.plan.batch_size(part)
            if count == 0:
                raise DataError(f"The {part} set is empty: coupling is measured between samples of both kinds.")
            if count < size:
                raise DataError(
                    f"The {part} set has {count} samples, fewer than {part}_batch_size={size}: pass "
                    f"--{part}-batch-size {count} or less ({part}_batch_size=… in Python), or more data."
                )
            if size < self.world:
                raise ConfigError(
                    f"{part}_batch_size={size} leaves some of the {self.world} processes without a sample: give at "
                    f"least {self.world}, or fewer processes."
                )

    def batches(self, part: str, pair: int, size: int | None = None) -> list[Any]:
        """This process's micro-batches of one part of pair ``pair`` (from 1)."""
        mine = self.draw(part, pair, size)[self.rank :: self.world]
        step = self.plan.micro_batch_size or len(mine)
        return [self.batch(part, mine[i : i + step]) for i in range(0, len(mine), step)]

    def batch(self, part: str, numbers: Sequence[int]) -> Any:
        """The samples with these numbers, collated and on the device."""
        return self.prepare(self.collate([self.samples[part][i] for i in numbers]))

    def draw(self, part: str, pair: int, size: int | None = None) -> list[int]:
        """Which samples are in the batch, over all processes; ``size`` in place of the plan's."""
        seed = (self.plan.seed * 1_000_003 + pair) * len(PARTS) + PARTS.index(part)
        generator = torch.Generator().manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)
        order: list[int] = torch.randperm(len(self.samples[part]), generator=generator).tolist()
        return order[: size or self.plan.batch_size(part)]

    def closures(self, part: str, pair: int, size: int | None = None) -> list[Closure]:
        """The shares of the pair's loss, one per micro-batch, and the same number of them on every process."""
        largest = -(-(size or self.plan.batch_size(part)) // self.world)
        count = -(-largest // (self.plan.micro_batch_size or largest))
        return self.losses[part].closures(self.model, self.batches(part, pair, size), part, count)

    def whole(self, part: str) -> list[Closure]:
        """The shares of the loss over all samples; a micro-batch is read when its turn comes, and dropped."""
        mine = range(self.rank, len(self.samples[part]), self.world)
        step = self.plan.micro_batch_size or self.plan.batch_size(part)
        makers = [partial(self.batch, part, mine[i : i + step]) for i in range(0, len(mine), step)]
        largest = -(-len(self.samples[part]) // self.world)
        return self.losses[part].streamed(self.model, makers, part, -(-largest // step))
