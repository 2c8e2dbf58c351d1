"""``rosu eval tofu MODEL [--retain MODEL|JSON] [--target MODEL|JSON]``."""

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
    from ..evaluation.tofu.run import TofuRequest


def main(argv: Sequence[str]) -> int:
    """Parse, evaluate, print the tables."""
    options = _parser().parse_args(argv)
    if wants_processes(options):
        return launch_replicas(options, argv, ("eval", "tofu"))
    speak(logging.INFO)

    from ..evaluation.processes import from_first
    from ..evaluation.tofu.run import run
    from ..presentation.tofu import write_evaluation

    asked: AbstractContextManager[TofuRequest] = nullcontext(_request(options))
    if options.smoke:
        from ..toys import tofu_toys

        asked = tofu_toys(_request(options))
    with asked as request:
        output = run(request)
        text = from_first(
            lambda: write_evaluation(
                output.out, retain=output.retain, target=output.target, transform=request.transform
            )
        )
    return tell(text)


def _parser() -> argparse.ArgumentParser:
    from ..data.tofu import DEFAULT_SOURCE

    parser = argparse.ArgumentParser(
        prog="rosu eval tofu",
        description="TOFU's metrics by OpenUnlearning's names and definitions, then Mem, Priv, Util, Agg and Agg_MU. "
        "A run that was interrupted goes on where it stopped.",
        epilog="Example: rosu eval tofu out/rosu --retain out/retain90 --target out/full --num-processes 4",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="model folder, LoRA adapter folder or hub id")
    parser.add_argument(
        "--retain", metavar="MODEL|JSON", help="model never trained on the forget set, or its results (for Priv)"
    )
    parser.add_argument(
        "--target", metavar="MODEL|JSON", help="model before unlearning, or its results (Util relative to it)"
    )
    parser.add_argument("--data", default=DEFAULT_SOURCE, metavar="SOURCE", help="hub id or folder of TOFU's files")
    parser.add_argument("--forget-split", default="forget10", metavar="NAME", help="forget01, forget05 or forget10")
    parser.add_argument(
        "--chat-format",
        metavar="NAME",
        help="one of OpenUnlearning's model names, 'tokenizer' (its chat template) or a YAML file; default: as the "
        "model was trained, else by its name",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: MODEL/evals; of a hub model rosu-eval/NAME")
    parser.add_argument("--metrics", nargs="+", metavar="NAME", help="only these, by OpenUnlearning's names")
    parser.add_argument(
        "--fluency-model",
        metavar="NAME|PATH",
        help="classifier for fluency, hub id or folder, or 'none'; default: the one OpenUnlearning uses",
    )
    parser.add_argument("--auc-transform", default="range", metavar="NAME", help="range (default), privleak or span")
    parser.add_argument("--limit", type=int, metavar="N", help="first N rows of each data set: a trial run")
    parser.add_argument(
        "--held-out-questions",
        type=int,
        metavar="N",
        help="first N held-out questions that training looked at (forget_until): no attack uses them",
    )
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="samples at once and per process (64)")
    parser.add_argument(
        "--batch-tokens", type=int, default=8192, metavar="N", help="tokens at once, padding included (8192)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="of a generated answer (200)")
    parser.add_argument(
        "--max-length", type=int, default=512, metavar="N", help="where formats without a chat template cut (512)"
    )
    add_loading_flags(parser)
    add_process_flags(parser)
    parser.add_argument("--overwrite", action="store_true", help="begin anew, reference models included")
    parser.add_argument("--smoke", action="store_true", help="toy models and toy questions, to check the rest")
    return parser


def _request(options: argparse.Namespace) -> TofuRequest:
    from ..evaluation.tofu.generation import CLASSIFIER
    from ..evaluation.tofu.metrics import METRICS, TofuSettings
    from ..evaluation.tofu.run import TofuRequest

    classifier = CLASSIFIER if options.fluency_model is None else options.fluency_model
    settings = TofuSettings(
        data=options.data,
        forget_split=options.forget_split,
        chat_format=options.chat_format,
        batch_size=options.batch_size,
        batch_tokens=options.batch_tokens,
        limit=options.limit,
        held_out_questions=options.held_out_questions,
        max_new_tokens=options.max_new_tokens,
        max_length=options.max_length,
        fluency_model=None if classifier == "none" else classifier,
        metrics=tuple(dict.fromkeys(options.metrics or METRICS)),
    )
    return TofuRequest(
        model=options.model,
        settings=settings,
        loading=loading(options),
        out=options.out,
        retain=options.retain,
        target=options.target,
        transform=options.auc_transform,
        overwrite=options.overwrite,
        processes=options.expect_processes,
    )
