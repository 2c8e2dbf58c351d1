"""What a cell needs to know of its task, and how any trainer is run inside a cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Steps = Callable[[int, int], None]
#: The measures of the model as it is at the moment.
Measure = Callable[[], dict[str, float]]


class Task(Protocol):
    """A model, data and measures that settings can be tried on."""

    @property
    def base(self) -> Mapping[str, Any]:
        """Settings that every cell starts from."""

    @property
    def columns(self) -> Mapping[str, str]:
        """Measure → heading, in the order of the table."""

    @property
    def plotted(self) -> tuple[str, ...]:
        """The measures that line plots show."""

    @property
    def digits(self) -> int:
        """Decimals of the tables."""

    @property
    def references(self) -> Mapping[str, str]:
        """Rows that are no method, name → label."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines below every table."""

    def identity(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What the figures depend on besides the settings: sizes, contents of files."""

    def reference_seeds(self, seeds: Sequence[int]) -> list[int]:
        """The seeds to measure the reference rows with."""

    def reference_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that matter to the reference rows."""

    def refer(self, name: str, seed: int, steps: Steps) -> dict[str, float]:
        """The measures of a reference row."""

    def run(self, values: Mapping[str, Any], seed: int, folder: Path, *, keep: bool, steps: Steps) -> dict[str, float]:
        """Unlearn in ``folder`` and measure; the model stays there only where ``keep`` says so."""


def unlearn(trainer: Any, *, keep: bool, steps: Steps) -> None:
    """Train without the printing of Trainer's own callbacks."""
    from transformers import PrinterCallback, ProgressCallback, TrainerCallback

    class Report(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps(state.global_step, state.max_steps)

    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(Report())
    trainer.train()
    if keep:
        trainer.save_model()
        trainer.save_state()
        trainer.create_model_card()
