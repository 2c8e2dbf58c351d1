"""The forget and the retain set of an orthogonality audit, and which mini-batch pairs are drawn from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ConfigError, DataError
from ...losses import COUNT
from ...training.trainer import ROSUMixin

#: The smallest retain batch of the default list, which doubles up to the retain set.
SMALLEST = 4

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class AuditedSet:
    """Samples by their numbers.

    Attributes:
        units: for every sample, the number of terms in its loss (answer tokens, for most losses).
        loss: the summed loss of the samples with these numbers.
        digest: a hash of the tokens, labels and masks of all samples.
    """

    units: NDArray[np.float64]
    loss: Callable[[Sequence[int]], Tensor]
    digest: str = ""

    def __len__(self) -> int:
        return len(self.units)


def audited_set(trainer: ROSUMixin, name: str, data: Any) -> AuditedSet:
    """``forget`` or ``retain`` under the trainer's loss, for when its training loop has begun."""
    count = COUNT[trainer.method_args.loss(name).unit]
    units = [float(count(trainer.data_collator([sample]))) for sample in data]
    samples = usable(name, data, units)
    digest = hashlib.sha256()
    for sample in samples:
        parts = [list(map(int, sample.get(key, ()))) for key in ("input_ids", "labels", "attention_mask")]
        digest.update(json.dumps(parts).encode())
    return AuditedSet(np.array([n for n in units if n > 0]), summed_loss(trainer, name, samples), digest.hexdigest())


def summed_loss(trainer: ROSUMixin, name: str, samples: Any) -> Callable[[Sequence[int]], Tensor]:
    """The trainer's loss of some of the samples, by their numbers."""

    def loss(numbers: Sequence[int]) -> Tensor:
        batch = trainer.to_device(trainer.data_collator([samples[i] for i in numbers]))
        return trainer.window_loss(name).share(trainer.model_wrapped, batch, 1.0)()

    return loss


def usable(name: str, samples: Any, units: Sequence[float]) -> list[Any]:
    """The samples with at least one unit; those without have no gradient."""
    kept = [sample for sample, count in zip(samples, units, strict=True) if count > 0]
    if not kept:
        raise DataError(
            f"No {name} sample has an answer token, so there is no gradient to audit: check the data and max_length."
        )
    return kept


@dataclass(frozen=True, kw_only=True)
class OrthogonalityPlan:
    """What is drawn.

    Attributes:
        forget, retain: samples in the two sets.
        forget_batch: samples in a forget mini-batch.
        sizes: samples in a retain mini-batch, one cell each; empty for the default.
        pairs: for every retain batch size.
    """

    forget: int
    retain: int
    forget_batch: int
    sizes: tuple[int, ...]
    pairs: int
    seed: int

    def checked(self) -> OrthogonalityPlan:
        """The plan with its default sizes filled in, after checking that every batch fits its set."""
        if self.pairs < 1:
            raise ConfigError(f"--pairs {self.pairs} must be at least 1 (the paper takes 500).")
        sizes = tuple(sorted(set(self.sizes))) or default_sizes(self.retain)
        asked = [("--forget-batch-size", self.forget_batch, "forget", self.forget)]
        asked += [("--batch-sizes", size, "retain", self.retain) for size in sizes]
        for flag, size, name, count in asked:
            if not 1 <= size <= count:
                raise ConfigError(
                    f"{flag} {size} does not fit the {name} set of {count} samples, from which a batch is drawn "
                    f"without repetition: give 1 to {count}."
                )
        return replace(self, sizes=sizes)

    @property
    def keys(self) -> list[tuple[int, int]]:
        """(retain batch size, number) of every pair."""
        return [(size, pair) for size in self.sizes for pair in range(self.pairs)]

    def draw(self, size: int, pair: int) -> tuple[Indices, Indices]:
        """The samples of a pair's forget and retain mini-batch."""
        return draw_pair(self.seed, pair, (self.forget, self.forget_batch), (self.retain, size))


def default_sizes(retain: int, smallest: int = SMALLEST) -> tuple[int, ...]:
    """``smallest`` (4), doubled as far as the retain set allows."""
    doublings = (retain // smallest).bit_length()
    return tuple(min(smallest << i, retain) for i in range(max(doublings, 1)))


def draw_pair(seed: int, pair: int, forget: tuple[int, int], retain: tuple[int, int]) -> tuple[Indices, Indices]:
    """Forget and retain mini-batch of a pair, each (set size, batch size), without repetition within a batch.

    Depends on its arguments alone, so that an interrupted audit resumes with the same pairs.
    """
    generator = np.random.default_rng([abs(seed), retain[1], pair])
    chosen = [generator.choice(count, size, replace=False) for count, size in (forget, retain)]
    return np.sort(chosen[0]), np.sort(chosen[1])
