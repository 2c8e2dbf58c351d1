"""Progress on the terminal: of attempts (demo, ablate, sweep), and of the stages of a measurement (audit)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_COLOURS = {"done": "green", "kept": "green", "pruned": "yellow", "failed": "red"}


class AttemptsBar:
    """An :class:`~rosu_llm.experiments.attempt.AttemptObserver`: a bar over attempts, one over steps, a line for each.

    Args:
        name: what the attempts are.
        counts_failed: whether ``total`` includes those that fail.
    """

    def __init__(self, name: str, total: int, finished: int = 0, *, counts_failed: bool = True) -> None:
        self.console = Console()
        self._counts_failed = counts_failed
        self._progress = _bars("{task.description}", self.console)
        self._attempts = self._progress.add_task(name, total=total, completed=finished)
        self._steps = self._progress.add_task("references", total=None, visible=False)

    def __enter__(self) -> AttemptsBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.update(self._steps, visible=False)
        self._progress.stop()

    def started(self, label: str) -> None:
        self._progress.reset(self._steps, description=escape(label), total=None, visible=True)

    def steps(self, done: int, total: int) -> None:
        self._progress.update(self._steps, completed=done, total=total, visible=True)

    def finished(self, label: str, status: str, text: str) -> None:
        line = f"[{_COLOURS[status]}]{status:<7}[/]{escape(label)}  {escape(text)}".rstrip()
        self.console.print(line, highlight=False, soft_wrap=True)
        self._progress.update(self._steps, visible=False)
        if status != "failed" or self._counts_failed:
            self._progress.advance(self._attempts)


@contextmanager
def stage_bars() -> Iterator[Callable[[str, int, int], None]]:
    """One bar on standard error for each stage that reports itself by name, steps done and steps in all."""
    stages: dict[str, Any] = {}
    with _bars("{task.description:<22}", Console(stderr=True)) as bars:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
            bars.update(stages[stage], completed=done)

        yield show


def _bars(description: str, console: Console) -> Progress:
    return Progress(TextColumn(description), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
