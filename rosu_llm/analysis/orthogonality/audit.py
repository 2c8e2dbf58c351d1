"""The full-retain orthogonality audit: ε_orth and its bound over many mini-batch pairs per retain batch size.

Does a direction that is neutral for a retain mini-batch stay neutral for the whole retain set? The error is bounded by
the error of the mini-batch retain gradient and falls with its batch size (paper, fig:orth_violin).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import ConfigError
from .gradients import PairSource, Progress
from .pairs import ROUNDING, PairError, draw_pair, pair_error
from .store import PairStore

SCHEMA = "rosu/audit-orthogonality/1"

#: The smallest retain batch of the default list, which doubles up to the retain set.
SMALLEST = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is sampled.

    Attributes:
        forget, retain: samples in the two sets.
        forget_batch: samples in a forget mini-batch.
        sizes: samples in a retain mini-batch, one cell each; empty for the default.
    """

    forget: int
    retain: int
    forget_batch: int
    sizes: tuple[int, ...]
    pairs: int
    seed: int


def make_plan(plan: Plan) -> Plan:
    """The plan with its default sizes filled in, checked against the sets."""
    if plan.pairs < 1:
        raise ConfigError(f"--pairs {plan.pairs} must be at least 1 (the paper takes 500).")
    sizes = tuple(sorted(set(plan.sizes))) or default_sizes(plan.retain)
    asked = [("--forget-batch-size", plan.forget_batch, "forget", plan.forget)]
    asked += [("--batch-sizes", size, "retain", plan.retain) for size in sizes]
    for flag, size, name, count in asked:
        if not 1 <= size <= count:
            raise ConfigError(
                f"{flag} {size} does not fit the {name} set of {count} samples, from which a batch is drawn without "
                f"repetition: give 1 to {count}."
            )
    return replace(plan, sizes=sizes)


def default_sizes(retain: int) -> tuple[int, ...]:
    """4, 8, 16, … as far as the retain set allows."""
    sizes = [SMALLEST]
    while 2 * sizes[-1] <= retain:
        sizes.append(2 * sizes[-1])
    return tuple(min(size, retain) for size in sizes)


def missing(plan: Plan, store: PairStore) -> bool:
    """Whether a pair of the plan is not measured yet."""
    return any((size, pair) not in store.pairs for size in plan.sizes for pair in range(plan.pairs))


def measure_pairs(plan: Plan, source: PairSource, store: PairStore, progress: Progress) -> None:
    """Measure every pair of the plan that the store does not have."""
    total = len(plan.sizes) * plan.pairs
    for i, size in enumerate(plan.sizes):
        for pair in range(plan.pairs):
            if (size, pair) not in store.pairs:
                drawn = draw_pair(plan.seed, pair, (plan.forget, plan.forget_batch), (plan.retain, size))
                store.put((size, pair), pair_error(source.gram(*drawn)))
            progress("mini-batch pairs", i * plan.pairs + pair + 1, total)


def cells(plan: Plan, pairs: Mapping[tuple[int, int], PairError], full_norm: float) -> list[dict[str, Any]]:
    """The distributions of every retain batch size."""
    return [_cell(size, [pairs[size, pair] for pair in range(plan.pairs)], full_norm) for size in plan.sizes]


def _cell(size: int, found: Sequence[PairError], full_norm: float) -> dict[str, Any]:
    used = [(pair.error, pair.bound) for pair in found if pair.error is not None]
    error, bound = (np.array([row[i] for row in used]) for i in (0, 1))
    return {
        "retain_batch_size": size,
        "pairs": len(found),
        "used": len(used),
        "degenerate": {why: sum(pair.degenerate == why for pair in found) for why in ("retain", "direction")},
        "violations": int((error > bound + ROUNDING * full_norm).sum()),
        "eps_orth": summary(error / full_norm),
        "bound": summary(bound / full_norm),
        "absolute": summary(error),
        "absolute_bound": summary(bound),
        "samples": {"eps_orth": (error / full_norm).tolist(), "bound": (bound / full_norm).tolist()},
    }


def summary(values: Any) -> dict[str, float] | None:
    """Percentiles, extremes and mean; None of nothing."""
    if len(values) == 0:
        return None
    names = ("min", "p5", "p25", "median", "p75", "p95", "max")
    found = np.percentile(values, (0, 5, 25, 50, 75, 95, 100))
    return {**{name: float(value) for name, value in zip(names, found, strict=True)}, "mean": float(np.mean(values))}
