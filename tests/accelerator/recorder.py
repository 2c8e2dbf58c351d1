"""What happens on the simulated accelerator, by call site.

Kinds: ``sync`` (the host waits for the device), ``h2d`` (copied to the device), ``made`` (a new tensor on the device;
temporaries inside kernels are not seen), ``float64`` (one of that type, or an input that a reduction converts to it).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.accelerator import device

#: Kind, call site, operation.
Key = tuple[str, str, str]


@dataclass
class Events:
    """How often and over how many bytes, by kind, call site and operation."""

    package: str
    counts: dict[Key, int] = field(default_factory=dict)
    bytes: dict[Key, int] = field(default_factory=dict)

    def total(self, kind: str, *, own: bool = False) -> int:
        """How many; ``own``: those with a frame of the package among their callers."""
        return sum(n for (found, site, _), n in self.counts.items() if found == kind and not (own and site[0] == "["))

    def volume(self, kind: str, *, own: bool = False) -> int:
        """The same in bytes."""
        return sum(n for (found, site, _), n in self.bytes.items() if found == kind and not (own and site[0] == "["))

    def rows(self, kind: str) -> list[tuple[int, int, str, str]]:
        """Count, bytes, call site and operation, the most first."""
        found = [(n, self.bytes[key], key[1], key[2]) for key, n in self.counts.items() if key[0] == kind]
        return sorted(found, reverse=True)

    def hear(self, kind: str, operation: str, size: int) -> None:
        """What the extension calls."""
        key = (kind, self._site(), operation)
        self.counts[key] = self.counts.get(key, 0) + 1
        self.bytes[key] = self.bytes.get(key, 0) + size

    def _site(self) -> str:
        """The innermost frame inside the package; else, in brackets, the innermost outside torch."""
        frame: Any = sys._getframe(2)
        other = ""
        while frame is not None:
            path, where = frame.f_code.co_filename, f"{frame.f_lineno} {frame.f_code.co_name}"
            if f"/{self.package}/" in path:
                return f"{path.split(f'/{self.package}/')[-1]}:{where}"
            if not other and "/torch/" not in path:
                other = f"[{'/'.join(path.split('/')[-3:])}:{where}]"
            frame = frame.f_back
        return other or f"[{threading.current_thread().name}: backward]"


@contextlib.contextmanager
def record(package: str = "rosu_llm") -> Iterator[Events]:
    """Collect events inside; they do not nest."""
    events = Events(package)
    device.install().listen(events.hear)
    try:
        yield events
    finally:
        device.install().listen(None)
