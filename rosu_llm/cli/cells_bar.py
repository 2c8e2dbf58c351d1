"""The progress of ``rosu ablate``: a bar over cells, one over the steps of the running cell, a line per cell."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from ..experiments.ablate.cells import Cell
    from ..experiments.store import Record


class CellsBar:
    """A :class:`~rosu_llm.experiments.ablate.cells.Watcher` on the terminal."""

    def __init__(self, total: int) -> None:
        self.console = Console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self.console)
        self._cells = self._progress.add_task("cells", total=total)
        self._steps = self._progress.add_task("", total=None, visible=False)

    def __enter__(self) -> CellsBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def started(self, cell: Cell) -> None:
        self._progress.reset(self._steps, description=_name(cell), total=None, visible=True)

    def steps(self, done: int, total: int) -> None:
        self._progress.update(self._steps, completed=done, total=total)

    def finished(self, cell: Cell, record: Record, *, reused: bool) -> None:
        colour = "red" if record.error else "green"
        word = "failed" if record.error else "kept" if reused else "done"
        time = "" if reused and not record.error else f"  {record.seconds:.1f} s"
        line = f"[{colour}]{word:<7}[/]{_name(cell)}{time}"
        if record.error:
            line += f"  {escape(record.error)}"
        self.console.print(line, highlight=False, soft_wrap=True)
        self._progress.update(self._steps, visible=False)
        self._progress.advance(self._cells)


def _name(cell: Cell) -> str:
    return escape(f"{cell.label}, seed {cell.seed}")
