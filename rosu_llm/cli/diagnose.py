"""``rosu diagnose --config FILE [--pairs N] [--rhos R …] [--out DIR] [--key value …]``."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from .common import add_launch_flags, check_out, launch, read_settings, shutdown

#: Flags that say what to measure; the others are settings of the run.
PLAN = ("pairs", "forget_batch_size", "retain_batch_size", "rhos", "points", "full_batch")


def main(argv: Sequence[str]) -> int:
    """Measure, show, write."""
    options, rest = _parser().parse_known_args(argv)
    if options.accelerate_config or options.num_processes:
        return launch(options.accelerate_config, options.num_processes, argv, verb=("diagnose",))
    from ..analysis.coupling.recipe import diagnose, diagnosis_recipe
    from ..presentation.coupling import print_diagnosis, write_diagnosis

    values = read_settings(options.config, rest)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    asked = {name: getattr(options, name) for name in PLAN}
    asked["rhos"] = None if options.rhos is None else tuple(options.rhos)
    if options.smoke:
        from ..toys import diagnose_toy

        diagnosis, recipe = diagnose_toy(values, asked, options.out)
    else:
        recipe = diagnosis_recipe(values, options.out)
        check_out(Path(recipe.config.output_dir))
        diagnosis = diagnose(recipe, asked)
    if recipe.config.should_save:
        print_diagnosis(diagnosis.document)
        for path in write_diagnosis(diagnosis.document, Path(recipe.config.output_dir)):
            print(f"wrote {path}")
    shutdown()
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
    parser.add_argument(
        "--full-batch",
        action="store_true",
        default=None,
        help="also measure all samples at once, streamed, and cos θ for batches growing up to them; the advice is then "
        "about the full batch",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results (default: output_dir)")
    add_launch_flags(parser)
    parser.add_argument("--smoke", action="store_true", help="a toy model and toy data, to see that everything runs")
    return parser
