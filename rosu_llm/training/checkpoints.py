"""Checkpoints that are either whole or recognisably not.

A run can be killed while it writes or deletes. A checkpoint carries a marker from before its first byte until after
its last one; resuming passes over marked ones, and over those that lack a part. Old ones are deleted only once the
new one is whole. Model files are written beside their destination and renamed into it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError

MARKER = "incomplete"
STATE_FILE = "rosu_state.json"
REFERENCE_FILE = "rosu_reference.safetensors"
THETA_FILE = "rosu_theta.safetensors"

_NAME = re.compile(r"checkpoint-(\d+)")
_STATE = "trainer_state.json"
#: Any of these is a model: whole, an adapter, FSDP's, DeepSpeed's, representation level's. Sharded ones have an index.
_MODELS = (
    "model.safetensors",
    "pytorch_model.bin",
    "adapter_model.*",
    "*/adapter_model.*",
    "pytorch_model_fsdp*",
    "global_step*",
    THETA_FILE,
)
_OPTIMIZERS = ("*optimizer*", "global_step*")
_SCHEDULERS = ("scheduler.pt", "global_step*")


@contextlib.contextmanager
def marked(folder: Path, writer: bool) -> Iterator[None]:
    """Mark ``folder`` as unfinished while the body writes into it (on the writing process)."""
    marker = folder / MARKER
    if writer:
        folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
    yield
    if writer:
        marker.unlink(missing_ok=True)


def last_complete(folder: Path, *, resumable: bool = False) -> Path | None:
    """The newest whole checkpoint in a run's folder; ``resumable``: among those with an optimizer's state."""
    for path in reversed(_checkpoints(folder)):
        if _defect(path, resumable=resumable) is None:
            return path
    return None


def in_checkpoint(path: Path, folder: Path) -> bool:
    """Whether ``path`` is or lies in one of the checkpoints of a run's folder, both as absolute paths."""
    return folder in path.parents and _NAME.fullmatch(path.relative_to(folder).parts[0]) is not None


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a run's folder, whole or not, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), p) for p in folder.iterdir() if p.is_dir() and (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def _defect(path: Path, *, resumable: bool) -> str | None:
    """Why ``path`` is no whole checkpoint; None where it is one."""
    if (path / MARKER).exists():
        return "was not written to the end (the run was killed while saving)"
    if not (path / _STATE).is_file():
        return f"is no checkpoint (it has no {_STATE})"
    if not _has_model(path):
        return "holds no model (part of it was deleted)"
    if resumable and not (_any(path, _OPTIMIZERS) and _any(path, _SCHEDULERS)):
        return "holds no optimizer state (it is a finished run's model, or was saved with save_only_model)"
    return None


def _has_model(path: Path) -> bool:
    indexes = (json.loads(index.read_text(encoding="utf-8")) for index in path.glob("*.index.json"))
    shards = {shard for index in indexes for shard in index["weight_map"].values()}
    return all((path / shard).is_file() for shard in shards) if shards else _any(path, _MODELS)


def _any(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(path.glob(pattern), None) is not None for pattern in patterns)


def rotate(newest: Path, limit: int | None, best: str | None = None) -> None:
    """Keep ``limit`` checkpoints beside and including ``newest``; broken ones go first, ``best`` never."""
    every = _checkpoints(newest.parent) if limit is not None and limit > 0 else []
    spared = {newest.resolve(), *([Path(best).resolve()] if best else [])}
    others = [path for path in every if path.resolve() not in spared]
    others.sort(key=lambda path: _defect(path, resumable=False) is None)
    for path in others[: max(0, len(every) - (limit or 0))]:
        _delete(path)


def remove_all(folder: Path) -> None:
    """Delete every checkpoint of a run, so that a new one in the same folder cannot be confused with it."""
    for path in _checkpoints(folder):
        _delete(path)


def _delete(path: Path) -> None:
    # Killed half-way, what is left must not look like a checkpoint: its state goes first. One that may not be deleted
    # stays, as with Trainer.
    with contextlib.suppress(OSError):
        (path / _STATE).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def resolve_resume(value: str | bool | None, output_dir: str) -> str | None:
    """What ``resume_from_checkpoint`` stands for: a whole checkpoint or nothing."""
    if not value:
        return None
    if value is True:
        found = last_complete(Path(output_dir), resumable=True)
        if found is None:
            raise ConfigError(
                f"resume_from_checkpoint=True, but {output_dir!r} holds no complete checkpoint with an optimizer's "
                "state. Start without it, or give the path of a checkpoint."
            )
        return str(found)
    path = Path(value)
    if not path.is_dir():
        raise ConfigError(f"resume_from_checkpoint={value!r} is not a folder.")
    defect = _defect(path, resumable=True)
    if defect is not None:
        raise ConfigError(
            f"resume_from_checkpoint={value!r} {defect}. Give a folder named checkpoint-N, or true for the newest "
            "complete one of output_dir."
        )
    return str(path)


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A scratch folder whose files replace those in ``folder`` once all are written; index files last."""
    stage = folder / ".saving"
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    try:
        yield stage
        for path in sorted(stage.iterdir(), key=lambda p: (p.name.endswith(".index.json"), p.name)):
            target = folder / path.name
            if path.is_dir():
                shutil.rmtree(target, ignore_errors=True)
            os.replace(path, target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextlib.contextmanager
def numpy_state_allowed() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` read the arrays of numpy's random state; nothing else is allowed in."""
    import numpy
    import torch

    allow = getattr(torch.serialization, "safe_globals", None)
    if allow is None:  # torch < 2.5
        yield
        return
    core = getattr(numpy, "_core", None) or numpy.core
    types = [core.multiarray._reconstruct, numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32))]
    with allow(types):
        yield
