"""``rosu train --config FILE [--key value …]``."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .common import add_launch_flags, launch, read_settings, shutdown


def main(argv: Sequence[str]) -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(
        prog="rosu train",
        description="Unlearn a model. Settings come from the YAML file; flags (with hyphens) override them: "
        "--rho 0.4 --per-device-train-batch-size 8. Every field of transformers.TrainingArguments is accepted.",
        epilog="Example: rosu train --config configs/recipes/tofu_llama-3.2-1b.yaml --output-dir out",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with 'key: value' lines")
    add_launch_flags(parser)
    parser.add_argument("--smoke", action="store_true", help="two steps on a toy model and toy data, to check the rest")
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="print memory per device and passes per step on 1 to 8 devices in every layout, load nothing, and stop",
    )
    parser.add_argument(
        "--requests",
        metavar="FILE",
        help="forget a list of sets one after another, each from the model before, and measure all of them after each",
    )
    parser.add_argument(
        "--list-settings", action="store_true", help="print the method's and the run's settings and stop"
    )
    options, rest = parser.parse_known_args(argv)
    if options.estimate:
        _print_estimate(read_settings(options.config, rest), smoke=options.smoke)
        return 0
    if options.accelerate_config or options.num_processes is not None:
        return launch(options.accelerate_config, options.num_processes, argv)
    if options.list_settings:
        _list_settings()
        return 0
    values = read_settings(options.config, rest)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("rosu_llm").setLevel(logging.INFO)
    if options.requests:
        _print_sequence(values, options.requests, smoke=options.smoke)
    elif options.smoke:
        from ..toys import train_toy

        train_toy(values)
    else:
        from ..recipes.run import run
        from ..recipes.settings import build

        run(build(values))
    shutdown()
    return 0


def _print_sequence(values: Mapping[str, Any], path: str, *, smoke: bool) -> None:
    """Run the requests of a file and print what they left; with ``smoke`` of a toy."""
    import os

    from rich.console import Console

    from ..experiments.sequence.requests import read_requests
    from ..experiments.sequence.run import run_sequence
    from ..presentation.sequence import sequence_section
    from ..presentation.writers import print_section

    requests = read_requests(path)
    if smoke:
        from ..toys import sequence_toy

        document = sequence_toy(values, requests)
    else:
        document = run_sequence(values, requests)
    if os.environ.get("RANK", "0") == "0":
        print_section(sequence_section(document), Console())


def _print_estimate(values: Mapping[str, Any], *, smoke: bool) -> None:
    """The table of every layout; with ``smoke`` of a toy model."""
    from rich.console import Console

    from ..presentation.estimate import estimate_section
    from ..presentation.writers import print_section
    from ..recipes.estimate import estimate
    from ..recipes.settings import build

    # The estimate is about devices, which need not be here.
    asked = {**values, "use_cpu": True}
    with TemporaryDirectory() if smoke else nullcontext() as scratch:
        if scratch is not None:
            from ..toys import toy_values

            asked = toy_values(asked, Path(scratch))
        recipe = build(asked)
        with redirect_stdout(sys.stderr):  # what libraries say is no part of the result
            needs = estimate(recipe)
    name = "a toy" if smoke else str(recipe.arguments.model_name_or_path)
    print_section(estimate_section(recipe, needs, name), Console())


def _list_settings() -> None:
    from rich.console import Console
    from rich.table import Table

    from ..recipes.settings import RunArguments
    from ..representation.config import RepresentationArguments
    from ..training.config import MethodArguments

    table = Table("setting", "default", "meaning", title="Settings of a run (TrainingArguments not shown)")
    for group in (RunArguments, MethodArguments):
        for f in dataclasses.fields(group):
            table.add_row(f.name, str(f.default), f.metadata.get("help", ""))
        table.add_section()
    known = {f.name: f.default for f in dataclasses.fields(MethodArguments)}
    for f in dataclasses.fields(RepresentationArguments):
        if f.name not in known or f.default != known[f.name]:
            table.add_row(f.name, str(f.default), f"Representation level. {f.metadata.get('help', '')}")
    Console().print(table)
