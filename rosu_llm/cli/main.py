"""``rosu``: few verbs, each imported only when it is called, so that ``rosu -h`` is instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__

VERBS = {
    "train": "unlearn a model as a YAML file and flags describe",
    "eval": "measure what a model forgot and kept (WMDP and MMLU through lm-eval)",
    "demo": "watch a small Llama forget ten fictitious people (minutes, CPU, nothing downloaded)",
    "ablate": "run a grid of variants in resumable cells, with tables and plots",
    "table": "the paper's TOFU summary from OpenUnlearning's result files",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. Errors of the package are one line on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="rosu",
        description="Make language models forget chosen training data while keeping the rest.",
        epilog="\n".join(["verbs:", *(f"  {verb:<8}{text}" for verb, text in VERBS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rosu-llm {__version__}")
    parser.add_argument("verb", choices=list(VERBS), metavar="verb", help="what to do; 'rosu VERB -h' explains it")
    options = parser.parse_args(arguments[:1] or ["-h"])

    from importlib import import_module

    from ..errors import RosuError

    try:
        result: int = import_module(f"{__package__}.{options.verb}").main(arguments[1:])
        return result
    except RosuError as error:
        print(f"rosu {options.verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"rosu {options.verb}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
