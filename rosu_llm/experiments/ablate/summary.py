"""Mean and spread over seeds: the one place where figures of several cells become one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean, stdev

from ..store import DONE, Record


@dataclass(frozen=True)
class Summary:
    """Mean, and standard deviation with n − 1 where there are two or more values."""

    mean: float
    spread: float | None
    count: int


def summarise(records: Mapping[int, Record], metric: str) -> Summary | None:
    """One measure over the seeds that finished; None where no seed has it."""
    found = (r.metrics.get(metric) for r in records.values() if r.status == DONE)
    values = [value for value in found if value is not None]
    if not values:
        return None
    return Summary(mean(values), stdev(values) if len(values) > 1 else None, len(values))
