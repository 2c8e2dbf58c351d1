"""``rosu demo [--out DIR] [--seeds N …]``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Run the embedded default and show it."""
    parser = argparse.ArgumentParser(
        prog="rosu demo",
        description="Train a small Llama on fictitious people, forget ten of them with several methods, compare. "
        "Runs on a CPU in minutes; nothing is downloaded.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("rosu-demo"), metavar="DIR", help="folder for results and plots"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N", help="average over these seeds")
    parser.add_argument("--smoke", action="store_true", help="a toy size that only shows that everything runs")
    options = parser.parse_args(argv)

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ..experiments.demo.contenders import LABELS
    from ..experiments.demo.run import FULL, SMOKE, average, run_seed
    from ..presentation.demo import table, write

    _quiet()
    console = Console()
    results = []
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        for seed in options.seeds:
            tasks: dict[str, int] = {}

            def show(name: str, done: int, total: int, seed: int = seed, tasks: dict[str, int] = tasks) -> None:
                if name not in tasks:
                    verb = "learning" if name in ("before", "retain_only") else "forgetting"
                    tasks[name] = bars.add_task(f"seed {seed}, {verb}: {LABELS[name].split(' (')[0]}", total=total)
                bars.update(tasks[name], completed=done)  # type: ignore[arg-type]

            results.append(run_seed(seed, size=SMOKE if options.smoke else FULL, progress=show))
    console.print(table(average(results)))
    for path in write(results, options.out):
        console.print(f"wrote {path}", highlight=False)
    return 0


def _quiet() -> None:
    """One thread and no chatter: at this size more threads only wait for each other."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
