"""The paper's ablations on images: components of the update, Jacobians (A1, A2), rank, radius, retain batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ..errors import ConfigError, unknown
from ..experiments.ablate.cells import plan, run_cells, selector
from ..experiments.ablate.grid import GRIDS, Grid, Variant
from ..experiments.attempt import AttemptObserver, Record
from .metrics import check_attack
from .rows import default_settings
from .settings import complete_vision, given_values
from .table import VisionDocument, dataset_name, paper_figures, row_of, vision_document
from .task import VisionTask

#: Grids that images have.
VISION_GRIDS = ("components", "jacobian", "rank", "rho", "retain_batch")
_RHOS = {"classwise": (0.1, 0.25, 0.5, 1.0), "random": (0.5, 0.75, 1.0, 1.25, 2.0)}


def vision_grid(name: str, protocol: str, given: Mapping[str, Any]) -> Grid:
    """The grid called ``name`` on top of ROSU's settings; ``given`` settings hold in every row.

    The grid of retain batch sizes goes from half of the given one to four times as many.
    """
    if name not in VISION_GRIDS:
        raise unknown("grid", name, VISION_GRIDS)
    own_settings = {**default_settings("rosu", protocol), "amplify": "direct"}
    fixed = given_values(given)
    if fixed.get("amplify") == "auto":  # which is direct for SGD
        del fixed["amplify"]
    base = {key: fixed.get(key, value) for key, value in own_settings.items()}
    if name == "retain_batch":
        usual = int(fixed.pop("retain_batch_size", 128))
        sizes = [max(1, usual // 2), usual, 2 * usual, 4 * usual]
        own = tuple(Variant(f"|B_r| = {n}", {"retain_batch_size": n}) for n in sizes)
        grid = Grid(name, "Retain images per step", own, axes=("retain_batch_size",))
    elif name == "rho":
        grid = Grid(
            name, "Radius", tuple(Variant(f"ρ = {rho}", {"rho": rho}) for rho in _RHOS[protocol]), axes=("rho",)
        )
    else:
        grid = GRIDS[name](base)
    for variant in grid.variants:
        for key, value in variant.settings.items():
            if fixed.get(key, value) != value:
                raise ConfigError(
                    f"{key}={fixed[key]!r} is given, and the grid {name!r} sets {key} itself: leave one of them out."
                )
    variants = tuple(Variant(v.label, {**base, **v.settings}, v.marks) for v in grid.variants)
    return Grid(grid.name, grid.title, variants, grid.columns, grid.axes, grid.notes)


def run_ablation(
    task: VisionTask,
    grid: Grid,
    seeds: Sequence[int],
    out: Path,
    observer: AttemptObserver,
    *,
    retry_failed: bool = False,
) -> VisionDocument:
    """The grid's rows, between Retrain and the paper's figures; what is in ``out`` already is not run again."""
    check_grid(task, grid, seeds)
    cells, rows = plan(task, [grid], seeds, complete_vision)
    select = selector(rows, run_cells(cells, task, out, observer, retry_failed=retry_failed))
    arguments = task.bench.arguments
    kind = grid.name if grid.name in ("components", "rank") else None
    dataset = dataset_name(str(arguments.data), task.bench.train.classes)
    paper = {} if kind is None else paper_figures(kind, dataset, arguments.protocol)
    made = [row_of(select, "", label, name, {}) for name, label in (("before", "before"), ("retrain", "Retrain"))]
    for variant in grid.variants:
        row = row_of(select, grid.name, variant.label, variant.label, paper)
        curve = epoch_curve(select(grid.name, variant.label))
        made.append({**row, "selected": dict(variant.settings), "trials": [], "curve": curve})
    return vision_document(task, made, seeds)


def check_grid(task: VisionTask, grid: Grid, seeds: Sequence[int]) -> None:
    """Raise for a grid that cannot be run, before any of it is."""
    check_attack()
    task.check([variant.settings for variant in grid.variants], seeds)


def epoch_curve(records: Mapping[int, Record]) -> dict[str, list[tuple[float, float, float | None]]]:
    """Measure → (epoch, mean, standard deviation over seeds), of the cells that kept one."""
    found: dict[str, dict[float, list[float]]] = {}
    for record in records.values():
        for entry in record.log:
            for name in ("RA", "FA"):
                if name in entry:
                    found.setdefault(name, {}).setdefault(entry["epoch"], []).append(entry[name])
    return {
        name: [(epoch, mean(own), stdev(own) if len(own) > 1 else None) for epoch, own in sorted(points.items())]
        for name, points in found.items()
    }
