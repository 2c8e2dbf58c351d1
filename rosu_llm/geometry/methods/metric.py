"""The option ``metric`` of rules that can project in the optimizer's metric."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import unknown
from .base import BaseRule, option

METRICS = ("euclidean", "adam")


@dataclass(frozen=True, kw_only=True)
class InMetric(BaseRule):
    """A rule that projects in the Euclidean metric or in the optimizer's."""

    metric: str = option(
        "euclidean", "Metric in which rosu and gu project: euclidean, or adam (the optimizer's).", exclusive=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metric not in METRICS:
            raise unknown("metric", self.metric, METRICS)
