"""Coupling of all samples at once, and what batches of growing size see of it.

A mini-batch gradient is the full one plus noise, g_b = g + n with E‖n‖² = S/b. So the cosine of two of them is near

    cos θ_b ≈ ⟨f, r⟩ / √((‖f‖² + S_f/b_f)(‖r‖² + S_r/b_r)),

which is smaller than that of the full gradients as long as noise dominates, and rises to it with b. The paper's Figure
1a is about full-batch gradients; a training step sees those of its batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from rich.progress import Progress

from ...errors import NonFiniteError
from .meter import PairMeter
from .pairs import PairWindows
from .record import PairRecord

logger = logging.getLogger(__name__)

#: Each size of the curve is so many times the one before.
GROWTH = 4


@dataclass(frozen=True)
class CurvePoint:
    """Pairs of batches of one size.

    Attributes:
        forget_batch_size, retain_batch_size: samples.
        cosines: cos θ of each pair.
        alignments: cosine of each retain batch's gradient with that of all retain samples.
    """

    forget_batch_size: int
    retain_batch_size: int
    cosines: tuple[float, ...]
    alignments: tuple[float, ...]


@dataclass(frozen=True)
class FullBatch:
    """All samples as one pair, and the curve that leads there."""

    record: PairRecord
    curve: tuple[CurvePoint, ...]


def growing_sizes(batch: tuple[int, int], whole: tuple[int, int]) -> list[tuple[int, int]]:
    """Forget and retain sizes from those of a batch up to, and without, the whole sets."""
    sizes, factor = [], 1
    while any(factor * b < n for b, n in zip(batch, whole, strict=True)):
        sizes.append((min(factor * batch[0], whole[0]), min(factor * batch[1], whole[1])))
        factor *= GROWTH
    return sizes


def measure_full_batch(
    meter: PairMeter, windows: PairWindows, after_pair: Callable[[], None], *, progress: bool
) -> FullBatch:
    """The whole sets first; then every size with as many pairs as would fit into them, two at least."""
    plan = windows.plan
    whole = (len(windows.samples["forget"]), len(windows.samples["retain"]))
    batch = (plan.batch_size("forget"), plan.batch_size("retain"))
    sizes = growing_sizes(batch, whole)
    pairs = [max(2, min(plan.pairs, *(n // b for n, b in zip(whole, size, strict=True)))) for size in sizes]
    with Progress(transient=True, disable=not progress) as bar:
        task = bar.add_task("full batch", total=1 + sum(pairs))
        try:
            record = meter.measure_whole()
        except NonFiniteError as error:
            raise NonFiniteError(
                f"The full batch could not be measured: {error}. Leave --full-batch out to measure pairs, of which bad "
                "ones are left out, or remove the samples whose loss is not finite."
            ) from error
        finally:
            after_pair()
        bar.advance(task)
        curve = []
        for size, count in zip(sizes, pairs, strict=True):
            found = []
            for pair in range(1, count + 1):
                found.append(meter.cosines(pair, size))
                after_pair()
                bar.advance(task)
            cosines, alignments = zip(*found, strict=True)
            curve.append(CurvePoint(*size, cosines, alignments))
    return FullBatch(record, tuple(curve))
