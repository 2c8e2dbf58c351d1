"""One owner per output folder: a lock while a run works in it, and a manifest of the files it wrote.

Without them, two runs at once would each report success and leave one result; a new adapter beside an old model would
be read as a mixture of both; and a model that nobody meant to replace would be gone. The manifest ``rosu_files.json``
is written with the first step and completed at the end, so that a folder tells whose it is also after a kill.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files import digest, read_json, weight_files, write_json
from ..training.checkpoints import last_complete, remove_all
from .record import RECORD_FILE

MANIFEST = "rosu_files.json"
LOCK = ".rosu.lock"
SCHEMA = "rosu/files/1"

#: Files of a model; those of a run without a manifest are known by their names.
_OF_MODEL = (
    "*.safetensors *.safetensors.index.json pytorch_model*.bin config.json generation_config.json adapter_* "
    "training_args.bin trainer_state.json README.md chat_format.json"
).split()
#: What other verbs made from the run that is replaced, and would pass for results of the new one.
_DERIVED = "audit_safeguards.* report.html report.md".split()

logger = logging.getLogger(__name__)


def occupant(folder: Path) -> str | None:
    """What a new run would destroy: ``checkpoints``, a finished ``run``, a ``foreign`` model, or nothing."""
    if last_complete(folder) is not None:
        return "checkpoints"
    described = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    if not described and not weight_files(folder):
        return None
    return "run" if any((folder / name).is_file() for name in (MANIFEST, RECORD_FILE)) else "foreign"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Refuse a folder that another run works in; the lock ends with the process, however that ends."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    path = folder / LOCK
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(file, 100).decode(errors="replace").strip()
            os.close(file)
            raise ConfigError(
                f"output_dir={str(folder)!r} is in use by another run ({owner or 'unknown'}): wait for it, or give "
                "another --output-dir."
            ) from error
        except OSError as error:  # some network file systems cannot lock
            logger.warning("%s cannot be locked (%s): see to it that no other run writes there.", folder, error)
            break
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                break
        os.close(file)  # its owner deleted it between our two calls
    try:
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {os.uname().nodename}".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


class RunFolder:
    """What a run does with its output folder; only on the process that writes, holding the lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = self._files()

    def claim(self, *, replace: bool) -> None:
        """Put the run's name on the folder; ``replace`` deletes what the run before it left there."""
        if replace:
            remove_all(self._folder)
            for path in self._old_files():
                path.unlink(missing_ok=True)
            self._before = self._files()
        write_json(self._folder / MANIFEST, {"schema": SCHEMA, "finished": False, "files": {}})

    def finish(self) -> None:
        """List what the run wrote, with digests."""
        now = self._files()
        written = [name for name, seen in now.items() if self._before.get(name) != seen and name != MANIFEST]
        files = {name: digest(self._folder / name) for name in sorted(written)}
        write_json(self._folder / MANIFEST, {"schema": SCHEMA, "finished": True, "files": files})

    def _old_files(self) -> list[Path]:
        """Files of the run before: those it listed, and whatever holds or describes a model here."""
        listed: dict[str, Any] = {}
        if (self._folder / MANIFEST).is_file():
            listed = read_json(self._folder / MANIFEST).get("files") or {}
        inside = [self._folder / name for name in listed if Path(name).name == name]
        found = [path for pattern in (*_OF_MODEL, *_DERIVED, RECORD_FILE) for path in self._folder.glob(pattern)]
        return [path for path in {*inside, *found} if path.is_file()]

    def _files(self) -> dict[str, tuple[int, int]]:
        """Name → size and time of change, of the files directly in the folder."""
        files = (path for path in self._folder.iterdir() if path.is_file() and path.name != LOCK)
        return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
