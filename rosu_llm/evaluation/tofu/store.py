"""Results that survive a kill.

OpenUnlearning's two files are rewritten whole after every finished part. ``rosu_eval.json`` beside them says of which
model and under which settings they are; results of anything else are refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...files import read_json, write_json
from ..results import FILES, SIDECAR
from .metrics import Entry

SCHEMA = "rosu/tofu-eval/1"


class Store:
    """The results in one folder.

    Args:
        metrics: those that belong into the summary.
        conditions: everything that determines the numbers.
        about: what else is worth knowing (names, versions); kept, not compared.
        overwrite: drop what is there.
    """

    def __init__(
        self,
        folder: Path,
        metrics: Sequence[str],
        conditions: Mapping[str, Any],
        about: Mapping[str, Any],
        *,
        overwrite: bool = False,
    ) -> None:
        self.folder, self.metrics = folder, set(metrics)
        self.entries: dict[str, Entry] = {}
        self.record: dict[str, Any] = {"schema": SCHEMA, **about, "conditions": dict(conditions), "seconds": {}}
        self._others = overwrite  # whether results of something else may be there
        _check_writable(folder)
        if (folder / FILES[0]).is_file() and not overwrite:
            self._go_on()

    def _go_on(self) -> None:
        """Take over what an earlier run left, unless it is of something else."""
        path, change = self.folder / SIDECAR, "Pass --overwrite, or another --out."
        if not path.is_file():
            raise ConfigError(f"{self.folder / FILES[0]} was not written by rosu (there is no {SIDECAR}). {change}")
        earlier = read_json(path)
        before, now = earlier.get("conditions", {}), self.record["conditions"]
        for key, value in now.items():
            then = before.get(key)
            if isinstance(value, Mapping) and isinstance(then, Mapping):
                # a file that only one of the two runs read is no clash
                differs = any(then[name] != value[name] for name in then.keys() & value.keys())
            else:
                differs = then != value
            if differs:
                raise ConfigError(
                    f"{self.folder} holds results of another {key.replace('_', ' ')} ({_short(then)}, now "
                    f"{_short(value)}). {change}"
                )
        now["data"] = {**before["data"], **now["data"]}
        self.record = {**earlier, **self.record, "seconds": earlier.get("seconds", {})}
        self.entries = read_json(self.folder / FILES[0])
        if (self.folder / FILES[1]).is_file():
            self.metrics |= read_json(self.folder / FILES[1]).keys()

    def drop(self, metric: str) -> None:
        """Forget a metric that does not hold any more."""
        self.entries.pop(metric, None)
        self.metrics.discard(metric)

    def put(self, entries: Mapping[str, Entry], part: str, seconds: float) -> None:
        """Add the metrics of a finished part and write everything."""
        self.entries.update(entries)
        self.record["seconds"][part] = round(seconds, 2)
        self.write()

    def write(self) -> dict[str, float]:
        """All files, each whole or as it was; returns the summary."""
        values = {name: self.entries[name]["agg_value"] for name in sorted(self.metrics) if name in self.entries}
        summary = {name: value for name, value in values.items() if value is not None}
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._others:  # else they would pass for this model's as soon as the next file is there
            for name in FILES:
                (self.folder / name).unlink(missing_ok=True)
            self._others = False
        write_json(self.folder / SIDECAR, self.record)  # first: results without it would be nobody's
        write_json(self.folder / FILES[0], dict(sorted(self.entries.items())))
        write_json(self.folder / FILES[1], summary)
        return summary


def _check_writable(folder: Path) -> None:
    """Raise now rather than after the first pass."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "cannot be written to" if there.is_dir() else "is not a folder"
        raise ConfigError(
            f"Results cannot be kept in {folder}: {there} {why}. Choose a folder with --out; for a reference model "
            "give its TOFU_EVAL.json instead of the model."
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
