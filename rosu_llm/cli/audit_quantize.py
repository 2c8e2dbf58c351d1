"""``rosu audit quantize MODEL --retain R --target T``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .audited import add_benchmark_flags, add_model_flags, asked, finish, measured
from .common import wants_processes
from .replicas import launch_replicas


def main(argv: Sequence[str]) -> int:
    """Parse, round and measure, print."""
    options = _parser().parse_args(argv)
    if wants_processes(options):
        return launch_replicas(options, argv, ("audit", "quantize"))

    from ..analysis.quantize.audit import QuantizeRequest, audit_quantize
    from ..analysis.quantize.rounding import check_precisions, has_library
    from ..evaluation.tofu.metrics import METRICS
    from ..evaluation.tofu.summary import FLUENCY
    from ..presentation.quantize import quantize_section
    from .progress import stage_bars

    usual = ["rtn8", "rtn4", *(["nf4"] if has_library() else [])]
    precisions = tuple(usual if options.precisions is None else options.precisions)
    check_precisions(precisions, options.group_size)
    fluent = options.fluency_model != "none"
    metrics = [metric for metric in METRICS if fluent or metric != FLUENCY]
    with asked(options, "quantize") as which, measured(options, which, metrics) as measure:
        request = QuantizeRequest(
            models=which.models,
            measure=measure,
            out=which.out,
            controls=which.controls,
            precisions=precisions,
            group=options.group_size,
            loading=which.loading,
            overwrite=options.overwrite or options.smoke,
        )
        with stage_bars() as progress:
            document = audit_quantize(request, progress)
        return finish(document, quantize_section(document), which.out / "audit_quantize.json")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rosu audit quantize",
        description="Is it still gone at 8 and 4 bits? All figures of the unlearned, the retain and the initial model "
        "with rounded weights, and the share of weights that rounding puts into another bucket than the initial "
        "model's. Stop it and the same command goes on.",
        epilog="Example: rosu audit quantize out/rosu --retain out/retain90 --target out/full --precisions nf4 rtn4",
        allow_abbrev=False,
    )
    add_model_flags(parser, dtype="auto")
    add_benchmark_flags(parser)
    parser.add_argument(
        "--precisions",
        nargs="+",
        metavar="NAME",
        help="rtn8, rtn4 (round to nearest), int8, nf4, fp4 (bitsandbytes); default rtn8 rtn4, and nf4 if installed",
    )
    parser.add_argument("--group-size", type=int, default=64, metavar="N", help="weights per scale of rtn (64)")
    return parser
