"""A trainer without a model, and an observer that remembers what it is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STEPS = 4


class Trainer:
    """Four steps that only tell the callbacks."""

    processing_class = None

    def __init__(self, folder: Path, during: Callable[[int], None] = lambda step: None) -> None:
        self.args = SimpleNamespace(output_dir=str(folder))
        self.callbacks: list[Any] = []
        self.steps = 0
        self._during = during

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def remove_callback(self, callback: Any) -> None: ...

    def train(self) -> None:
        control = SimpleNamespace(should_training_stop=False)
        while self.steps < STEPS and not control.should_training_stop:
            self.steps += 1
            self._during(self.steps)
            for callback in self.callbacks:
                callback.on_step_end(None, SimpleNamespace(global_step=self.steps, max_steps=STEPS), control)

    def save_model(self) -> None:
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")

    def save_state(self) -> None: ...

    def create_model_card(self) -> None: ...

    def is_world_process_zero(self) -> bool:
        return False


class Silent:
    """An observer that remembers labels, how attempts ended, and what was said of their ends."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.ends: list[str] = []
        self.texts: list[str] = []

    def started(self, label: str) -> None:
        self.labels.append(label)

    def steps(self, done: int, total: int) -> None: ...

    def finished(self, label: str, status: str, text: str) -> None:
        self.ends.append(status)
        self.texts.append(text)
