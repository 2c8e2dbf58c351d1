"""``rosu ablate --out DIR [--task demo | --config FILE] [--grid NAME,… | --axis key=v1,v2 …] [--key value …]``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import check_out, quiet, refuse_several_processes, seed_number

if TYPE_CHECKING:
    from ..experiments.ablate.grid import Grid
    from ..experiments.attempt import Task


def main(argv: Sequence[str]) -> int:
    """Plan the cells, run those that are not there, show and write the tables; 1 if any cell failed."""
    options, rest = _parser().parse_known_args(argv)

    from ..errors import unknown
    from ..experiments.ablate.cells import plan, run_cells, selector
    from ..presentation.ablation import grid_section
    from ..presentation.writers import SUFFIXES, print_section, write_figures, write_table

    formats = _words(options.format) or list(SUFFIXES)
    for form in formats:
        if form not in SUFFIXES:
            raise unknown("table format", form, SUFFIXES)
    check_out(options.out)
    values = _values(options, rest)
    seeds = _seeds(options.seeds, values)
    refuse_several_processes(
        "rosu ablate runs its cells in one process: start it without torchrun or accelerate launch."
    )
    quiet(threads=None if options.config else 1)
    task = _task(options, values)
    grids = _grids(options, task, values)
    cells, rows = plan(task, grids, seeds)

    from .progress import AttemptsBar

    with AttemptsBar("cells", len(cells)) as bar:
        records = run_cells(
            cells, task, options.out, bar, retry_failed=options.retry_failed, keep_models=options.keep_models
        )
    select = selector(rows, records)
    sections = [grid_section(grid, task, select, seeds) for grid in grids]
    for section in sections:
        print_section(section, bar.console)
    written = [path for s in sections for path in write_table(s.tables[0], options.out / s.key, formats)]
    figures, missing = write_figures([figure for section in sections for figure in section.figures], options.out)
    for path in [*written, *figures]:
        bar.console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if missing:
        bar.console.print(missing, markup=False)
    failed = [record for record in records.values() if record.error]
    if failed:
        again = "fix the settings, or pass --retry-failed to try them again"
        bar.console.print(f"{len(failed)} of {len(cells)} cells failed: {again}.", highlight=False)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rosu ablate",
        description="Run a grid of variants on a task, cell by cell. Finished cells are kept in DIR and not run again; "
        "a failed one is marked and the others go on. Tables (markdown, LaTeX, JSON) and line plots go to DIR. "
        "Settings of 'rosu train' are accepted as flags and hold for all cells: --learning-rate 1e-3.",
        epilog="Example: rosu ablate --out ablation --grid components,rho --seeds 0 1 2",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for cells, tables and plots")
    parser.add_argument("--task", metavar="NAME", help="demo (default): the embedded task of 'rosu demo'")
    parser.add_argument("--config", metavar="FILE", help="your own task: a configuration of 'rosu train'")
    parser.add_argument(
        "--grid",
        metavar="NAMES",
        help="components (default), jacobian, rank, rho, retain_batch, methods; several with commas",
    )
    parser.add_argument(
        "--axis", action="append", default=[], metavar="KEY=V1,V2", help="a setting to vary; several give all pairs"
    )
    parser.add_argument(
        "--seeds", type=seed_number, nargs="+", metavar="N", help="mean and spread over them (default 0)"
    )
    parser.add_argument("--format", metavar="NAMES", help="markdown,latex,json (default: all three)")
    parser.add_argument("--retry-failed", action="store_true", help="run failed cells again")
    parser.add_argument("--keep-models", action="store_true", help="keep the model of every cell in DIR/models")
    parser.add_argument("--smoke", action="store_true", help="a toy size that only shows that everything runs")
    return parser


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _values(options: argparse.Namespace, rest: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Settings from the file and from flags, apart: an axis may replace the file's, not a flag's."""
    from ..errors import ConfigError, unknown
    from ..experiments.ablate.grid import RESERVED
    from ..recipes.settings import read_config, read_flags

    if options.config and options.task:
        raise ConfigError("--task and --config both name a task: give one of them.")
    if options.task not in (None, "demo"):
        raise unknown("task", options.task, ("demo",))
    flags = read_flags(rest)
    for key, instead in RESERVED.items():
        if key in flags:
            raise ConfigError(f"--{key.replace('_', '-')} is set for every cell: use {instead}.")
    return {"file": read_config(options.config) if options.config else {}, "flags": flags}


def _seeds(given: list[int] | None, values: dict[str, dict[str, Any]]) -> list[int]:
    from ..errors import ConfigError

    file_seed = values["file"].pop("seed", 0)
    values["file"].pop("output_dir", None)
    seeds = given or [int(file_seed)]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {' '.join(map(str, seeds))}: every seed once.")
    return seeds


def _task(options: argparse.Namespace, values: dict[str, dict[str, Any]]) -> Task:
    merged = {**values["file"], **values["flags"]}
    if not options.config:
        from ..experiments.demo.task import DemoTask
        from ..experiments.demo.world import FULL, SMOKE

        return DemoTask(SMOKE if options.smoke else FULL, merged, options.out / "models")
    from ..experiments.config_task import ConfigTask

    if options.smoke:
        from ..toys import toy_values

        merged = toy_values(merged, options.out)
    return ConfigTask(merged)


def _grids(options: argparse.Namespace, task: Task, values: dict[str, dict[str, Any]]) -> list[Grid]:
    from ..experiments.ablate.grid import free_grid, named_grid
    from ..experiments.config_task import known_settings

    names = list(dict.fromkeys(_words(options.grid) or ([] if options.axis else ["components"])))
    known = known_settings(task.base)
    grids = [named_grid(name, task.base, known) for name in names]
    if options.axis:
        grids.append(free_grid(options.axis, task.base, values["flags"]))
    return grids
