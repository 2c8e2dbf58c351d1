"""``rosu train --config FILE [--key value …]``."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Sequence

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
        "--list-settings", action="store_true", help="print the method's and the run's settings and stop"
    )
    options, rest = parser.parse_known_args(argv)
    if options.accelerate_config or options.num_processes is not None:
        return launch(options.accelerate_config, options.num_processes, argv)
    if options.list_settings:
        _list_settings()
        return 0
    values = read_settings(options.config, rest)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("rosu_llm").setLevel(logging.INFO)
    if options.smoke:
        from ..toys import train_toy

        train_toy(values)
    else:
        from ..recipes.run import run
        from ..recipes.settings import build

        run(build(values))
    shutdown()
    return 0


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
