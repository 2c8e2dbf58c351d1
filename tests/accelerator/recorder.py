"""What happens on the simulated accelerator, by call site.

Kinds: ``sync`` (the host waits for the device), ``h2d`` (copied to the device), ``made`` (a new tensor on the device;
temporaries inside kernels are not seen), ``float64`` (one of that type, or an input that a reduction converts to it).
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.accelerator import device

KINDS = ("sync", "h2d", "made", "float64")

#: Kind, call site, operation.
Key = tuple[str, str, str]


@dataclass
class Events:
    """How often and over how many bytes, by kind, call site and operation."""

    folder: str
    counts: dict[Key, int] = field(default_factory=dict)
    bytes: dict[Key, int] = field(default_factory=dict)

    def total(self, kind: str, *, own: bool = False) -> int:
        """How many; ``own``: those that the package itself asked for."""
        return sum(n for (found, site, _), n in self.counts.items() if found == kind and not (own and site[0] == "["))

    def volume(self, kind: str, *, own: bool = False) -> int:
        """The same in bytes."""
        return sum(n for (found, site, _), n in self.bytes.items() if found == kind and not (own and site[0] == "["))

    def rows(self, kind: str) -> list[tuple[int, int, str, str]]:
        """Count, bytes, call site and operation, the most first."""
        found = [(n, self.bytes[key], key[1], key[2]) for key, n in self.counts.items() if key[0] == kind]
        return sorted(found, reverse=True)

    def since(self, before: Events) -> Events:
        """What has come since an earlier copy."""
        new = {key: n - before.counts.get(key, 0) for key, n in self.counts.items() if n > before.counts.get(key, 0)}
        return Events(self.folder, new, {key: self.bytes[key] - before.bytes.get(key, 0) for key in new})

    def hear(self, kind: str, operation: str, size: int) -> None:
        """What the extension calls."""
        key = (kind, self._site(), operation)
        self.counts[key] = self.counts.get(key, 0) + 1
        self.bytes[key] = self.bytes.get(key, 0) + size

    def _site(self) -> str:
        """The innermost frame outside torch, as who asked for it; in brackets where it is not of the package."""
        frame: Any = sys._getframe()
        while frame is not None:
            path, where = frame.f_code.co_filename, f"{frame.f_lineno} {frame.f_code.co_name}"
            if path.startswith(self.folder):
                return f"{path[len(self.folder) + 1 :]}:{where}"
            if path != __file__ and "/torch/" not in path:
                return f"[{'/'.join(path.split('/')[-2:])}:{where}]"
            frame = frame.f_back
        return f"[{threading.current_thread().name}: backward]"


@contextlib.contextmanager
def record(package: str = "rosu_llm") -> Iterator[Events]:
    """Collect events inside; they do not nest."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations
    events = Events(found.submodule_search_locations[0])
    device.install().listen(events.hear)
    try:
        yield events
    finally:
        device.install().listen(None)
