"""``rosu audit extract MODEL --retain R --target T``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .audited import add_model_flags, asked, finish
from .common import wants_processes
from .replicas import launch_replicas


def main(argv: Sequence[str]) -> int:
    """Parse, ask, print."""
    options = _parser().parse_args(argv)
    if wants_processes(options):
        return launch_replicas(options, argv, ("audit", "extract"))

    from ..analysis.extract.audit import ExtractRequest, audit_extract
    from ..analysis.extract.ways import WAYS
    from ..presentation.extract import extract_section
    from .progress import stage_bars

    with asked(options, "extract") as which:
        small = options.smoke
        request = ExtractRequest(
            models=which.models,
            out=which.out,
            controls=which.controls,
            data=which.data,
            forget_split=options.forget_split,
            chat_format=which.chat_format,
            ways=tuple(WAYS if options.ways is None else options.ways),
            samples=min(options.samples, 4) if small else options.samples,
            ks=None if small or options.k is None else tuple(options.k),
            temperature=options.temperature,
            threshold=options.threshold,
            seeds=tuple(dict.fromkeys(options.seeds)),
            limit=None if small else options.limit,
            max_new_tokens=5 if small else options.max_new_tokens,
            max_length=options.max_length,
            batch_size=options.eval_batch_size,
            loading=which.loading,
            overwrite=options.overwrite or small,
        )
        request.check()
        with stage_bars() as progress:
            document = audit_extract(request, progress)
        return finish(document, extract_section(document), which.out / "audit_extract.json")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rosu audit extract",
        description="Can it be had by asking differently? Sampling (leak@k), answer prefixes, other words and "
        "languages, a compliant beginning, few-shot prompts and the logit lens, each as a difference to the retain "
        "model with a bootstrap interval. Stop it and the same command goes on.",
        epilog="Example: rosu audit extract out/rosu --retain out/retain90 --target out/full --samples 32",
        allow_abbrev=False,
    )
    add_model_flags(parser, dtype="auto")
    parser.add_argument("--ways", nargs="*", metavar="NAME", help="only these (default: all; docs/audits.md has them)")
    parser.add_argument("--samples", type=int, default=128, metavar="N", help="answers drawn per question (128)")
    parser.add_argument("--k", type=int, nargs="+", metavar="K", help="of leak@k (default 1 2 4 … up to N)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="of sampling (1)")
    parser.add_argument("--threshold", type=float, default=0.7, metavar="X", help="ROUGE-L recall of a hit (0.7)")
    return parser
