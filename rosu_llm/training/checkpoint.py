"""Checkpoints that are either whole or recognisably not.

A run can be killed while it writes. A checkpoint carries a marker from before its first byte until
after its last one; resuming passes over marked ones. Model files are written beside their destination
and renamed into it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError

MARKER = "incomplete"
STATE_FILE = "rosu_state.json"
REFERENCE_FILE = "rosu_reference.safetensors"

_NAME = re.compile(r"checkpoint-(\d+)")


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


def last_complete(folder: Path) -> Path | None:
    """The newest whole checkpoint in a run's folder."""
    if not folder.is_dir():
        return None
    found = [(int(m[1]), p) for p in folder.iterdir() if p.is_dir() and (m := _NAME.fullmatch(p.name))]
    for _, path in sorted(found, reverse=True):
        if (path / "trainer_state.json").is_file() and not (path / MARKER).exists():
            return path
    return None


def remove_all(folder: Path) -> None:
    """Delete every checkpoint of a run, so that a new one in the same folder cannot be confused with it."""
    for path in [p for p in folder.iterdir() if p.is_dir() and _NAME.fullmatch(p.name)] if folder.is_dir() else []:
        shutil.rmtree(path)


def resolve_resume(value: str | bool | None, output_dir: str) -> str | None:
    """What ``resume_from_checkpoint`` stands for: a whole checkpoint or nothing."""
    if not value:
        return None
    if value is True:
        found = last_complete(Path(output_dir))
        if found is None:
            raise ConfigError(
                f"resume_from_checkpoint=True, but {output_dir!r} holds no complete checkpoint. "
                "Start without it, or give the path of a checkpoint."
            )
        return str(found)
    path = Path(value)
    if not path.is_dir():
        raise ConfigError(f"resume_from_checkpoint={value!r} is not a folder.")
    if not (path / "trainer_state.json").is_file() and not (path / MARKER).exists():
        raise ConfigError(
            f"resume_from_checkpoint={value!r} is no checkpoint (it has no trainer_state.json). "
            "Give a folder named checkpoint-N, or true for the newest of output_dir."
        )
    if (path / MARKER).exists():
        raise ConfigError(
            f"{value!r} was not written to the end (the run was killed while saving). "
            "Use an earlier one, or resume_from_checkpoint=True to pick the newest complete one."
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


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
