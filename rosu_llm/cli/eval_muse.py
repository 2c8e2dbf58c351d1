"""``rosu eval muse MODEL [--retain MODEL|JSON] [--target MODEL|JSON]``."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from .common import wants_processes
from .replicas import add_loading_flags, add_process_flags, launch_replicas, loading, speak, tell

if TYPE_CHECKING:
    from ..evaluation.muse.run import MuseRequest


def main(argv: Sequence[str]) -> int:
    """Parse, evaluate, print the table."""
    options = _parser().parse_args(argv)
    if wants_processes(options):
        return launch_replicas(options, argv, ("eval", "muse"))
    speak(logging.INFO)

    from ..evaluation.muse.run import run
    from ..evaluation.processes import from_first
    from ..presentation.muse import muse_page

    asked: AbstractContextManager[MuseRequest] = nullcontext(_request(options))
    if options.smoke:
        from ..toys import muse_toys

        asked = muse_toys(_request(options))
    with asked as request:
        output = run(request)
        text = from_first(lambda: muse_page(output))
    return tell(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rosu eval muse",
        description="MUSE's metrics by OpenUnlearning's names and definitions: VerbMem, KnowMem on forget and retain, "
        "PrivLeak. A run that was interrupted goes on where it stopped.",
        epilog="Example: rosu eval muse out/rosu --split News --retain muse-bench/MUSE-News_retrain",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="model folder, LoRA adapter folder or hub id")
    parser.add_argument("--retain", metavar="MODEL|JSON", help="model never trained on the forget set (for PrivLeak)")
    parser.add_argument("--target", metavar="MODEL|JSON", help="model before unlearning, for the table")
    parser.add_argument("--split", default="News", metavar="NAME", help="News (default) or Books")
    parser.add_argument("--data", metavar="SOURCE", help="hub id or folder (default muse-bench/MUSE-NAME)")
    parser.add_argument("--chat-format", metavar="NAME", help="as in 'rosu eval tofu'; MUSE's models: Llama-2-7b-hf")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: MODEL/evals_muse_NAME")
    parser.add_argument("--metrics", nargs="+", metavar="NAME", help="only these, by OpenUnlearning's names")
    parser.add_argument("--limit", type=int, metavar="N", help="first N rows of each data set: a trial run")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="samples at once and per process (16)")
    parser.add_argument("--batch-tokens", type=int, default=16384, metavar="N", help="tokens at once (16384)")
    add_loading_flags(parser)
    add_process_flags(parser)
    parser.add_argument("--overwrite", action="store_true", help="begin anew, reference models included")
    parser.add_argument("--smoke", action="store_true", help="toy models and toy texts, to check the rest")
    return parser


def _request(options: argparse.Namespace) -> MuseRequest:
    from ..evaluation.muse.evaluate import METRICS, MuseSettings
    from ..evaluation.muse.run import MuseRequest

    return MuseRequest(
        model=options.model,
        settings=MuseSettings(
            split=options.split,
            data=options.data,
            chat_format=options.chat_format,
            batch_size=options.batch_size,
            batch_tokens=options.batch_tokens,
            limit=options.limit,
            metrics=tuple(dict.fromkeys(options.metrics or METRICS)),
        ),
        loading=loading(options),
        out=options.out,
        retain=options.retain,
        target=options.target,
        overwrite=options.overwrite,
        processes=options.expect_processes,
    )
