"""Is the process that ran a trial still there?

A process that is killed leaves its trial in the state "running". Every worker therefore holds a lock on a file of its
own as long as it lives; the operating system releases it however the process ends, and process ids that are used again
cannot mislead. Workers that share no folder, and systems without such locks, have Optuna's heartbeat (see ``study``).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from uuid import uuid4

try:
    import fcntl
except ImportError:  # not a Unix system
    fcntl = None  # type: ignore[assignment]


class Presence:
    """This worker, present while the context lasts."""

    def __init__(self, folder: Path) -> None:
        self.name = f"{socket.gethostname()}-{uuid4().hex[:12]}"
        self._path = folder / self.name

    def __enter__(self) -> Presence:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_CREAT | os.O_RDWR)
        if fcntl is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._file)


def is_gone(folder: Path, name: str) -> bool:
    """Whether the worker of this name is known to have ended; False where that cannot be known."""
    path = folder / name
    if fcntl is None or not path.is_file():
        return False
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one worker at a time through; the others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
