"""A task without a model: its figures are given, and every call is remembered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rosu_llm.experiments.attempt import DONE, FAILED, Record, Started, Steps
from tests.experiments.stand_in import Trainer


class StandIn:
    """``figures(values, seed)`` are the measures of a cell; what it raises, the cell raises."""

    columns: Mapping[str, str] = {"forget_em": "forget EM", "retain_em": "retain EM"}
    plotted = ("retain_em", "forget_em")
    digits = 3
    notes: tuple[str, ...] = ()

    def __init__(self, figures: Any, *, references: Mapping[str, str] | None = None, **base: Any) -> None:
        self.figures, self.base = figures, {"method": "rosu", **base}
        self.references: Mapping[str, str] = references or {}
        self.calls: list[Any] = []
        self.content = "one"
        self.details: Callable[[], dict[str, Any]] | None = None

    def identity(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"task": "stand-in", "content": self.content}

    def reference_seeds(self, seeds: Sequence[int]) -> list[int]:
        return list(seeds)

    def reference_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def refer(self, name: str, seed: int, steps: Steps) -> Started:
        self.calls.append((name, seed))
        return Started(None, lambda: {"forget_em": 1.0, "retain_em": 1.0})

    def start(self, values: Mapping[str, Any], seed: int, folder: Path, steps: Steps) -> Started:
        self.calls.append((values["rho"], seed))
        return Started(Trainer(folder), lambda: self.figures(values, seed), details=self.details)


def done(seed: int, **metrics: float) -> Record:
    return Record(DONE, metrics, key=f"key{seed}", label="row", seed=seed)


def failed(seed: int, error: str) -> Record:
    return Record(FAILED, error=error, key=f"key{seed}", label="row", seed=seed)
