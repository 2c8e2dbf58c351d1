"""Everything that is written when the cells are there: tables in the formats asked for, and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..experiments.ablate.cells import Selector
from ..experiments.ablate.grid import Grid
from ..experiments.task import Task
from ..files import write_atomically
from .ablation_plots import axis_plot, numeric_axes
from .plots import PlotsUnavailableError
from .tables import Table, render

SUFFIXES = {"markdown": "md", "latex": "tex", "json": "json"}


def write(
    tables: Mapping[str, Table], grids: Sequence[Grid], task: Task, select: Selector, out: Path, formats: Sequence[str]
) -> tuple[list[Path], str | None]:
    """Write ``<grid>.<suffix>`` and ``<grid>_<axis>.png``; returns them, and why there are no plots if so."""
    written = []
    for name, table in tables.items():
        for form in formats:
            path = out / f"{name}.{SUFFIXES[form]}"
            write_atomically(path, render(table, form, digits=task.digits))
            written.append(path)
    try:
        for grid in grids:
            axes = numeric_axes(grid)
            for key in axes:
                path = out / (f"{grid.name}_{key}.png" if grid.name == "axes" else f"{grid.name}.png")
                axis_plot(grid, key, task, select, path)
                written.append(path)
    except PlotsUnavailableError as error:
        return written, str(error)
    return written, None
