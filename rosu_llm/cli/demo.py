"""``rosu demo [--out DIR] [--seeds N …]``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .common import check_out, quiet, seed_number


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
    parser.add_argument("--seeds", type=seed_number, nargs="+", default=[0], metavar="N", help="average over these")
    parser.add_argument("--smoke", action="store_true", help="a toy size that only shows that everything runs")
    options = parser.parse_args(argv)

    from ..experiments.demo.task import run_demo
    from ..experiments.demo.world import FULL, SMOKE
    from ..presentation.demo import demo_table, write_demo
    from ..presentation.writers import print_table
    from .progress import AttemptsBar

    quiet(threads=1)
    check_out(options.out)
    bars: list[AttemptsBar] = []

    def observe(models: int) -> AttemptsBar:
        bars.append(AttemptsBar("models", models))
        return bars[0]

    document = run_demo(SMOKE if options.smoke else FULL, options.seeds, observe)
    console = bars[0].console
    print_table(demo_table(document["rows"]), console)
    written, problem = write_demo(document, options.out)
    for path in written:
        console.print(f"wrote {path}", highlight=False)
    if problem:
        console.print(problem, markup=False)
    return 0
