"""``rosu doctor [--config FILE] [--processes N] [--layouts NAME …] [--out DIR]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from .common import LAYOUTS, check_out, quiet, read_settings, refuse_several_processes


def main(argv: Sequence[str]) -> int:
    """Examine, show, write; 0 only if all is well."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if rest and not options.config:
        parser.error(f"{rest[0]} is a setting of a recipe: give the recipe with --config FILE")
    refuse_several_processes("rosu doctor starts its own processes: run it once on each machine, without a launcher.")
    if not 0 < options.timeout < float("inf"):
        parser.error(f"--timeout {options.timeout:g} is no time: give seconds, e.g. 300")
    if options.out:
        check_out(options.out)
    values = read_settings(options.config, rest) if options.config else None

    from ..analysis.doctor.examine import check_processes, examine
    from ..files import write_json
    from ..presentation.doctor import doctor_section
    from ..presentation.writers import write_page
    from ..presentation.writers.markdown import section as markdown
    from ..recipes.settings import build

    processes = 1 if options.smoke else check_processes(options.processes)
    quiet()
    toys = TemporaryDirectory() if options.smoke and values is not None else nullcontext()
    with toys as scratch, redirect_stdout(sys.stderr):  # what libraries say is no part of the result
        if scratch and values is not None:
            from ..toys import toy_values

            values = toy_values(values, Path(scratch))
        document = examine(
            processes,
            options.layouts,
            recipe=None if values is None else build(values),
            steps=1 if options.smoke else 3,
            timeout=options.timeout,
            out=options.out,
        )
    section = doctor_section(document)
    print(markdown(section))
    if options.out:
        written, _ = write_page(section, options.out / "doctor.md")
        for path in (write_json(options.out / "doctor.json", document), *written):
            print(f"wrote {path}")
    return 1 if document["problems"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rosu doctor",
        description="The first thing to run on a new machine, and what to paste into a bug report: what is installed, "
        "which devices there are, which layouts can run, and whether three steps in each give the weights of one "
        "process on these devices (two processes on CPUs). With a recipe also whether it fits into memory and disk; "
        "its settings are accepted as flags. Exit code 0 only if everything that can run agrees.",
        epilog="Example: rosu doctor --config configs/recipes/tofu_llama-3.2-1b.yaml --out doctor",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of 'rosu train' to compare memory and disk with")
    parser.add_argument("--processes", type=int, metavar="N", help="default: one per device; 2 on CPUs")
    names = ", ".join(LAYOUTS)
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, metavar="NAME", help=f"only these of {names}"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="for each layout, its compiler included (300)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write doctor.md and doctor.json there")
    parser.add_argument("--smoke", action="store_true", help="one step in one process; a toy in place of the recipe")
    return parser
