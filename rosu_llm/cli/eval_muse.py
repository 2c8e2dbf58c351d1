"""``rosu eval muse MODEL [--retain MODEL|JSON] [--target MODEL|JSON]``."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from .common import LAYOUTS, launch, shutdown, wants_processes

if TYPE_CHECKING:
    from ..evaluation.muse.run import MuseRequest


def main(argv: Sequence[str]) -> int:
    """Parse, evaluate, print the table."""
    options = _parser().parse_args(argv)
    if wants_processes(options):
        return _launch(options, argv)
    first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("rosu_llm").setLevel(logging.INFO if first else logging.ERROR)

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
    if first:
        print(text, end="")
    shutdown()
    return 0


def _launch(options: argparse.Namespace, argv: Sequence[str]) -> int:
    from ..compat import accelerator_kind
    from ..errors import ConfigError

    layout = options.accelerate_config or "ddp"
    if layout in LAYOUTS and layout != "ddp":
        raise ConfigError(
            f"--accelerate-config {layout} shards the model; evaluation shares the questions instead: use ddp, or "
            "leave it out."
        )
    arguments = list(argv)
    if options.num_processes is not None:
        arguments += ["--expect-processes", str(options.num_processes)]
    if accelerator_kind() is None:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    return launch(layout, options.num_processes, arguments, ("eval", "muse"), ("--mixed_precision", "no"))


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
    dtypes = ["auto", "float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", default="auto", choices=dtypes, help="of the weights; auto: as they are stored")
    parser.add_argument("--attn-implementation", metavar="NAME", help="sdpa, eager, flash_attention_2, …")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--num-processes", type=int, metavar="N", help="share the questions among N devices")
    parser.add_argument("--accelerate-config", metavar="NAME|FILE", help="ddp, or an accelerate file of yours")
    parser.add_argument("--overwrite", action="store_true", help="begin anew, reference models included")
    parser.add_argument("--smoke", action="store_true", help="toy models and toy texts, to check the rest")
    parser.add_argument("--expect-processes", type=int, help=argparse.SUPPRESS)
    return parser


def _request(options: argparse.Namespace) -> MuseRequest:
    from ..evaluation.muse.evaluate import METRICS, MuseSettings
    from ..evaluation.muse.run import MuseRequest
    from ..evaluation.tofu.run import Loading

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
        loading=Loading(
            dtype=options.dtype,
            attn_implementation=options.attn_implementation,
            trust_remote_code=options.trust_remote_code,
        ),
        out=options.out,
        retain=options.retain,
        target=options.target,
        overwrite=options.overwrite,
        processes=options.expect_processes,
    )
