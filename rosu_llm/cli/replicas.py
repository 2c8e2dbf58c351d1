"""What commands share that measure whole models: every process holds one, and they share the questions out."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .common import LAYOUTS, launch, shutdown

if TYPE_CHECKING:
    from ..evaluation.tofu.run import Loading

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_loading_flags(parser: argparse.ArgumentParser, *, dtype: str = "auto") -> None:
    """How weights are loaded."""
    meaning = "auto: as they are stored" if dtype == "auto" else f"default {dtype}"
    parser.add_argument("--dtype", default=dtype, choices=DTYPES, help=f"of the weights; {meaning}")
    parser.add_argument("--attn-implementation", metavar="NAME", help="sdpa, eager, flash_attention_2, …")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Several processes."""
    parser.add_argument("--num-processes", type=int, metavar="N", help="share the questions among N devices")
    parser.add_argument("--accelerate-config", metavar="NAME|FILE", help="ddp, or an accelerate file of yours")
    parser.add_argument("--expect-processes", type=int, help=argparse.SUPPRESS)


def loading(options: argparse.Namespace) -> Loading:
    """What :func:`add_loading_flags` was given."""
    from ..evaluation.tofu.run import Loading

    return Loading(
        dtype=options.dtype,
        attn_implementation=options.attn_implementation,
        trust_remote_code=options.trust_remote_code,
    )


def launch_replicas(options: argparse.Namespace, argv: Sequence[str], verb: tuple[str, str]) -> int:
    """Replace this process by a launcher of several."""
    from ..compat import accelerator_kind
    from ..errors import ConfigError

    layout = options.accelerate_config or "ddp"
    if layout in LAYOUTS and layout != "ddp":
        raise ConfigError(
            f"--accelerate-config {layout} shards the model; rosu {' '.join(verb)} shares the questions instead: use "
            "ddp, or leave it out."
        )
    arguments = list(argv)
    if options.num_processes is not None:  # the processes count themselves: a launcher that starts fewer is noticed
        arguments += ["--expect-processes", str(options.num_processes)]
    if accelerator_kind() is None:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    # autocast would change what --dtype says
    return launch(layout, options.num_processes, arguments, verb, ("--mixed_precision", "no"))


def is_first() -> bool:
    """Whether this is the process that prints."""
    return os.environ.get("RANK", "0") == "0"


def speak(level: int) -> None:
    """Let the first process log from ``level`` on, and the others errors."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("rosu_llm").setLevel(level if is_first() else logging.ERROR)


def tell(text: str) -> int:
    """Print on the first process, then leave together."""
    if is_first():
        print(text, end="")
    shutdown()
    return 0
