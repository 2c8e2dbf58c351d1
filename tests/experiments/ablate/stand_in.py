"""A task without a model: its figures are given, and every call is remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rosu_llm.experiments.store import DONE, FAILED, Record
from rosu_llm.experiments.task import Steps


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

    def identity(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"task": "stand-in", "content": self.content}

    def reference_seeds(self, seeds: Sequence[int]) -> list[int]:
        return list(seeds)

    def reference_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def refer(self, name: str, seed: int, steps: Steps) -> dict[str, float]:
        self.calls.append((name, seed))
        return {"forget_em": 1.0, "retain_em": 1.0}

    def run(self, values: Mapping[str, Any], seed: int, folder: Path, *, keep: bool, steps: Steps) -> dict[str, float]:
        self.calls.append((values["rho"], seed))
        folder.mkdir(parents=True)
        (folder / "model").write_text("weights")
        steps(1, 2)
        result: dict[str, float] = self.figures(values, seed)
        return result


class Silent:
    """A watcher that remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, str, bool]] = []

    def started(self, cell: Any) -> None: ...

    def steps(self, done: int, total: int) -> None: ...

    def finished(self, cell: Any, record: Record, *, reused: bool) -> None:
        self.lines.append((cell.label, cell.seed, record.status, reused))


def done(seed: int, **metrics: float) -> Record:
    return Record(f"key{seed}", "row", seed, DONE, metrics)


def failed(seed: int, error: str) -> Record:
    return Record(f"key{seed}", "row", seed, FAILED, error=error)
