"""The progress of ``rosu sweep``: a bar over trials, one over the steps of the running trial, a line per trial."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..experiments.sweep.search import ERROR, SCORED
from ..presentation.sweep_table import shown

_COLOURS = {TrialState.COMPLETE: "[green]done   [/]", TrialState.PRUNED: "[yellow]pruned [/]"}


class TrialsBar:
    """A :class:`~rosu_llm.experiments.sweep.search.Watcher` on the terminal."""

    def __init__(self, total: int, finished: int) -> None:
        self.console = Console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self.console)
        self._trials = self._progress.add_task("trials", total=total, completed=finished)
        self._steps = self._progress.add_task("references", total=None)

    def __enter__(self) -> TrialsBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.update(self._steps, visible=False)
        self._progress.stop()

    def started(self, number: int, settings: Mapping[str, Any]) -> None:
        self._progress.reset(self._steps, description=escape(_name(number, settings)), total=None)

    def steps(self, done: int, total: int) -> None:
        self._progress.update(self._steps, completed=done, total=total)

    def finished(self, trial: FrozenTrial) -> None:
        scores = trial.user_attrs.get(SCORED, {})
        result = ", ".join(f"{name} {score:.3f}" for name, score in scores.items() if score is not None)
        if trial.state == TrialState.PRUNED:
            step, value = max(trial.intermediate_values.items())
            result = f"at {step} % with {value:.3f}"
        line = f"{_COLOURS.get(trial.state, '[red]failed [/]')}{escape(_name(trial.number, trial.params))}  "
        self.console.print(line + escape(trial.user_attrs.get(ERROR, result)), highlight=False, soft_wrap=True)
        if trial.state in _COLOURS:
            self._progress.advance(self._trials)


def _name(number: int, settings: Mapping[str, Any]) -> str:
    return f"trial {number}: " + ", ".join(f"{key} {shown(value)}" for key, value in settings.items())
