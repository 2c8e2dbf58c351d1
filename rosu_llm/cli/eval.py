"""``rosu eval BENCHMARK …``: measure a model; each benchmark is imported only when it is called."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

BENCHMARKS = {
    "tofu": "TOFU's memorisation, privacy and utility metrics, numbers equal to OpenUnlearning's",
    "wmdp": "WMDP-Bio, WMDP-Cyber and MMLU through lm-eval, and ΔScore against the base model",
    "muse": "MUSE's verbatim and knowledge memorisation and privacy leakage, numbers equal to OpenUnlearning's",
}


def main(argv: Sequence[str]) -> int:
    """Hand over to the benchmark."""
    arguments = list(argv)
    parser = argparse.ArgumentParser(
        prog="rosu eval",
        description="Measure what a model forgot and what it kept.",
        epilog="\n".join(["benchmarks:", *(f"  {name:<8}{text}" for name, text in BENCHMARKS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "benchmark", choices=list(BENCHMARKS), metavar="benchmark", help="'rosu eval BENCHMARK -h' explains it"
    )
    options = parser.parse_args(arguments[:1] or ["-h"])
    result: int = import_module(f"{__package__}.eval_{options.benchmark}").main(arguments[1:])
    return result
