"""Processes that work on the same things: who they are, what the first decides for all, and a desk with their tasks."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

import torch.distributed as dist

from ...errors import RosuError

PIECE = 1 << 22  # characters; the store takes no value above 8 MB

T = TypeVar("T")


def world() -> tuple[int, int]:
    """This process's number and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def from_first(action: Callable[[], T]) -> T:
    """What ``action`` returns or raises on the first process, on all of them."""
    rank, size = world()
    if size == 1:
        return action()
    outcome: list[Any] = [None, None]
    if rank == 0:
        try:
            outcome[0] = action()
        except RosuError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def first_error(mine: RosuError | None) -> RosuError | None:
    """Of what the processes met, the same on all of them, so that none waits for one that gave up."""
    _, size = world()
    reasons = [mine] * size
    if size > 1:
        dist.all_gather_object(reasons, mine)
    return next((reason for reason in reasons if reason is not None), None)


class Desk:
    """Task numbers 0, 1, 2, … for whoever asks next, and a tray for what becomes of them; here for one process."""

    stopped = False

    def __init__(self) -> None:
        self._numbers, self._tray = count(), list[Any]()

    def claim(self) -> int:
        """The number of a task that nobody has had."""
        return next(self._numbers)

    def hand_in(self, result: Any) -> None:
        """Leave a result, something JSON can hold, for the first process."""
        self._tray.append(result)

    def collect(self) -> list[Any]:
        """What was handed in since the last time; for the first process only."""
        found, self._tray = self._tray, []
        return found

    def stop(self) -> None:
        """Let no process claim another task."""


class SharedDesk(Desk):
    """The same for several processes, none of which waits for another.

    It lives in the key-value store at which torch.distributed's processes met. Results travel as JSON, which keeps
    every bit of a number.
    """

    _opened = count()  # every process opens the same desks in the same order

    def __init__(self) -> None:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        self._store = PrefixStore(f"rosu_llm/desk{next(self._opened)}", _get_default_store())
        self._rank, size = world()
        self._handed_in, self._collected = 0, [0] * size

    @property
    def stopped(self) -> bool:  # type: ignore[override]
        return bool(self._store.check(["stopped"]))

    def claim(self) -> int:
        return int(self._store.add("claimed", 1)) - 1

    def hand_in(self, result: Any) -> None:
        text, key = json.dumps(result), f"{self._rank}/{self._handed_in}"
        pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{key}/{number}", piece)
        self._store.set(key, str(len(pieces)))  # last: only now it is all there
        self._handed_in += 1

    def collect(self) -> list[Any]:
        found = []
        for rank in range(len(self._collected)):
            while self._store.check([key := f"{rank}/{self._collected[rank]}"]):
                pieces = [f"{key}/{number}" for number in range(int(self._store.get(key)))]
                found.append(json.loads(b"".join(map(self._store.get, pieces))))
                for done in (key, *pieces):
                    self._store.delete_key(done)
                self._collected[rank] += 1
        return found

    def stop(self) -> None:
        self._store.set("stopped", "1")
