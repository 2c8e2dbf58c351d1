"""How long training took: the steps alone, without what is measured between them, added up over interruptions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..files import read_json, write_json


class Clock(TrainerCallback):
    """Seconds from the first step to the last.

    Args:
        path: file for the seconds up to each checkpoint; a resumed training goes on from them. Steps that were lost
            with an interruption, and made again, count once.

    Attributes:
        seconds: so far; None where an earlier part of the training is not known.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.seconds: float | None = 0.0
        self._path, self._begun = path, 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._begun += time.perf_counter() - begun

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds, self._begun = self._earlier(state.global_step), time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._path is not None and state.is_world_process_zero:
            write_json(self._path, {"step": state.global_step, "seconds": self._now()})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = self._now()

    def _now(self) -> float | None:
        return None if self.seconds is None else self.seconds + time.perf_counter() - self._begun

    def _earlier(self, step: int) -> float | None:
        if step == 0:
            return 0.0
        try:
            found = read_json(self._path) if self._path is not None else {}
        except (OSError, ValueError):
            return None
        return found.get("seconds") if found.get("step") == step else None
