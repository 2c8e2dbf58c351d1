"""``rosu``: few verbs, each imported only when it is called, so that ``rosu -h`` is instant."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from .. import __version__
from .failures import report

# Where it is installed, transformers and peft import it, and on CPUs it then recommends a package nobody here needs.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

VERBS = {
    "train": "unlearn a model as a YAML file and flags describe",
    "eval": "measure what a model forgot and kept (TOFU, MUSE; WMDP and MMLU through lm-eval)",
    "demo": "watch a small Llama forget ten fictitious people (minutes, CPU, nothing downloaded)",
    "diagnose": "measure how strongly forget and retain gradients are coupled, before any training",
    "data": "generate other answers to questions, for losses that prefer them",
    "memory": "store gradients of the retain data, for unlearning where it cannot be kept",
    "sweep": "search any settings with Optuna, selected by Agg_MU; resumable, with table and frontier plot",
    "ablate": "run a grid of variants in resumable cells, with tables and plots",
    "vision": "the paper's image classifiers: run, table, ablate, diagnose, audit",
    "audit": "attack an unlearned model beside controls; check what the method assumes",
    "doctor": "what is installed, which devices and layouts work here, checked against one process",
    "report": "one self-contained page about one or several runs: curves, metrics, answers, audits",
    "table": "the paper's TOFU summary from OpenUnlearning's result files",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. Errors are one line on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="rosu",
        description="Make language models forget chosen training data while keeping the rest.",
        epilog="\n".join(["verbs:", *(f"  {verb:<10}{text}" for verb, text in VERBS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rosu-llm {__version__}")
    parser.add_argument("verb", choices=list(VERBS), metavar="verb", help="what to do; 'rosu VERB -h' explains it")
    options = parser.parse_args(arguments[:1] or ["-h"])

    from importlib import import_module

    try:
        result: int = import_module(f"{__package__}.{options.verb}").main(arguments[1:])
        return result
    except BrokenPipeError:  # whoever read the output has left, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"rosu {options.verb}: the output was closed before its end", file=sys.stderr)
        return 1
    except Exception as error:
        return report(options.verb, error)
    except KeyboardInterrupt:
        print(f"rosu {options.verb}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
