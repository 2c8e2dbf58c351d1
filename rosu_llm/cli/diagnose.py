"""``rosu diagnose --config FILE [--pairs N] [--rhos R …] [--out DIR] [--key value …]``."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

#: Flags that say what to measure; the others are settings of the run.
PLAN = ("pairs", "forget_batch_size", "retain_batch_size", "rhos", "points")


def main(argv: Sequence[str]) -> int:
    """Measure, show, write."""
    options, rest = _parser().parse_known_args(argv)
    if options.accelerate_config or options.num_processes:
        from .launcher import launch

        return launch(options.accelerate_config, options.num_processes, argv, verb=("diagnose",))
    from ..analysis.coupling.run import diagnose
    from ..recipes.settings import read_config, read_flags
    from .leaving import leave_group

    values = read_config(options.config) if options.config else {}
    values.update(read_flags(rest))
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    asked = {name: getattr(options, name) for name in PLAN}
    asked["rhos"] = None if options.rhos is None else tuple(options.rhos)
    diagnosis, folder, writes = diagnose(values, asked, out=options.out, smoke=options.smoke)
    if writes:
        diagnosis.show()
        for path in diagnosis.save(folder):
            print(f"wrote {path}")
    leave_group()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rosu diagnose",
        description="Measure how strongly forgetting and retaining pull on the same weights, before any training and "
        "without changing a weight: cos θ over mini-batch pairs, by layer and kind of parameter; what the standard and "
        "the retain-neutral perturbation do to both losses; up to which ρ the latter pays. Settings of 'rosu train' "
        "are accepted as flags: --lora-r 8 --forget-loss npo. --rho is the radius the advice is about.",
        epilog="Example: rosu diagnose --config configs/recipes/tofu_llama-3.2-1b.yaml --pairs 16 --out diagnosis",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of 'rosu train'")
    parser.add_argument("--pairs", type=int, metavar="N", help="mini-batch pairs (default 16)")
    parser.add_argument(
        "--forget-batch-size", type=int, metavar="N", help="forget samples per pair, over all devices (the run's)"
    )
    parser.add_argument(
        "--retain-batch-size", type=int, metavar="N", help="retain samples per pair, over all devices (the run's)"
    )
    parser.add_argument(
        "--rhos", type=float, nargs="+", metavar="R", help="radii of the perturbations (default 0.1 0.2 0.4 0.8)"
    )
    parser.add_argument(
        "--points", type=int, metavar="N", help="radii between 0 and the largest at which losses are measured (8)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results (default: output_dir)")
    parser.add_argument("--accelerate-config", metavar="NAME", help="on several devices: ddp, fsdp2, zero1, zero2, …")
    parser.add_argument("--num-processes", type=int, metavar="N", help="number of devices for --accelerate-config")
    parser.add_argument("--smoke", action="store_true", help="a toy model and toy data, to see that everything runs")
    return parser
