"""What a run of OpenUnlearning recorded about itself: Hydra's files with its configuration, and the trainer's state.

Hydra writes ``.hydra/config.yaml``, ``overrides.yaml`` and ``hydra.yaml`` into a job's folder, or into one below
``multirun`` for jobs started with ``-m``; transformers writes ``trainer_state.json``, and
``python -m rosu_llm.openunlearning tofu`` writes ``rosu_run.json`` (launcher and devices). Any of them may be missing,
and nothing is guessed in its place.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import DataError

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class HydraRecord:
    """What Hydra recorded of one job; empty where the folder holds no record."""

    config: Mapping[str, Any] = field(default_factory=dict)  # as composed
    overrides: tuple[str, ...] = ()  # what was typed on the command line
    hydra: Mapping[str, Any] = field(default_factory=dict)  # its own settings, with the chosen file of each group

    def get(self, path: str, otherwise: Any = None) -> Any:
        """The configuration's value at ``a.b.c``, if any; Hydra records references such as ``${x.y}`` as they are."""
        value = _at(self.config, path)
        if value is None:
            return otherwise
        for _ in range(8):  # a chain of references; a circle of them ends as unknown
            if not isinstance(value, str) or "${" not in value:
                return value
            if found := _REFERENCE.fullmatch(value):
                value = _at(self.config, found[1])
            else:
                value = _REFERENCE.sub(lambda part: str(_at(self.config, part[1])), value)
        return None

    def choice(self, group: str) -> str | None:
        """Which file was chosen for a configuration group such as ``trainer``."""
        choices = _at(self.hydra, "runtime.choices")
        value = choices.get(group) if isinstance(choices, Mapping) else None
        return value if isinstance(value, str) else None

    @property
    def config_name(self) -> str | None:
        """The primary configuration, such as ``unlearn.yaml``."""
        value = _at(self.hydra, "job.config_name")
        return value if isinstance(value, str) else None

    @property
    def uses_plugin(self) -> bool:
        """Whether this package's callback took part."""
        callbacks = _at(self.hydra, "callbacks")
        entries = callbacks.values() if isinstance(callbacks, Mapping) else ()
        return any(str(_at(entry, "_target_")).startswith("rosu_llm.") for entry in entries)


def read_hydra(folder: Path) -> HydraRecord:
    """The record of the job that ran in ``folder``, or of the job of a multirun that wrote there."""
    if not (folder / ".hydra").is_dir():
        folder = folder.absolute()
        for root in folder.parents:
            if (place := _multirun_jobs(root / "multirun").get(folder)) is not None:
                return _read_job(place)
    return _read_job(folder)


@lru_cache(maxsize=32)
def _multirun_jobs(folder: Path) -> dict[Path, Path]:
    """Where the jobs of Hydra's multiruns wrote → their own folders; of several, the last one counts."""
    jobs: dict[Path, Path] = {}
    for config in sorted(folder.glob("*/*/*/.hydra/config.yaml"), key=lambda path: path.stat().st_mtime):
        job = _read_job(config.parent.parent)
        for key in ("trainer.args.output_dir", "paths.output_dir"):
            if isinstance(written := job.get(key), str):
                jobs[Path(os.path.normpath(folder.parent / written))] = config.parent.parent
                break
    return jobs


def _read_job(folder: Path) -> HydraRecord:
    config, overrides, hydra = (_yaml(folder / ".hydra" / f"{name}.yaml") for name in ("config", "overrides", "hydra"))
    return HydraRecord(
        config if isinstance(config, dict) else {},
        tuple(map(str, overrides)) if isinstance(overrides, list) else (),
        hydra.get("hydra") or {} if isinstance(hydra, dict) else {},
    )


def read_record(path: Path) -> dict[str, Any]:
    """A JSON object such as ``trainer_state.json``; empty when the file is absent."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}): delete it or repeat the run.") from error
    return content if isinstance(content, dict) else {}


def _yaml(path: Path) -> Any:
    if not path.is_file():
        return None
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not YAML ({str(error).splitlines()[0]}): delete it or repeat the run.") from error


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(key)
    return tree
