"""Measured pairs as JSON lines: appended one by one, so that a killed audit loses at most the pair it was in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...files import write_atomically
from .pairs import PairError

Key = tuple[int, int]  # retain batch size, pair


def stored_conditions(path: Path) -> dict[str, Any] | None:
    """What the pairs in ``path`` were measured on; None where there is no such file."""
    if not path.is_file():
        return None
    with path.open(encoding="utf-8") as file:
        try:
            found = json.loads(file.readline())["conditions"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no record of an audit: move it away, or give another --out.") from error
    return dict(found)


class PairStore:
    """The pairs of one audit; the first line of the file says what they were measured on.

    Args:
        writes: whether this process writes (one of several does).
    """

    def __init__(self, path: Path, conditions: Mapping[str, Any], *, writes: bool = True) -> None:
        self._path, self._writes = path, writes
        self.pairs: dict[Key, PairError] = {}
        self.full_norm: float | None = None
        found = stored_conditions(path)
        if found is not None:
            _compare(path, found, json.loads(json.dumps(conditions)))
            self._read()
        if writes:
            # Also drops a last line that was cut off.
            lines = [
                json.dumps({"conditions": conditions}),
                *([] if self.full_norm is None else [_norm(self.full_norm)]),
            ]
            lines += [_line(key, pair) for key, pair in self.pairs.items()]
            write_atomically(path, "\n".join(lines) + "\n")

    def _read(self) -> None:
        for line in self._path.read_text(encoding="utf-8").splitlines()[1:]:
            try:
                entry = json.loads(line)
                if "full_gradient_norm" in entry:
                    self.full_norm = float(entry["full_gradient_norm"])
                    continue
                key = int(entry["retain_batch_size"]), int(entry["pair"])
                self.pairs[key] = PairError(entry["error"], entry["bound"], entry["degenerate"])
            except (ValueError, KeyError, TypeError):
                continue

    def put(self, key: Key, pair: PairError) -> None:
        """Keep a pair."""
        self.pairs[key] = pair
        self._append(_line(key, pair))

    def put_full_norm(self, value: float) -> None:
        """Keep the norm of the full retain gradient."""
        if value != self.full_norm:
            self.full_norm = value
            self._append(_norm(value))

    def _append(self, line: str) -> None:
        if self._writes:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def _line(key: Key, pair: PairError) -> str:
    entry = {"retain_batch_size": key[0], "pair": key[1]}
    return json.dumps({**entry, "error": pair.error, "bound": pair.bound, "degenerate": pair.degenerate})


def _norm(value: float) -> str:
    return json.dumps({"full_gradient_norm": value})


def _compare(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    other = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
    if other:
        raise ConfigError(
            f"{path} holds pairs of another audit ({', '.join(other)} differ): give another --out, or delete the file."
        )
