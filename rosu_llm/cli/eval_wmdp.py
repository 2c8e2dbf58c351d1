"""``rosu eval wmdp MODEL --base MODEL0`` and ``rosu eval wmdp --join RESULT.json …``."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from .common import check_out, launch, seed_number, shutdown, wants_processes

if TYPE_CHECKING:
    from ..evaluation.wmdp.run import WmdpRequest


def main(argv: Sequence[str]) -> int:
    """Parse; evaluate or join; print the table."""
    parser = _parser()
    options = parser.parse_args(argv)
    if (options.model is None) == (options.join is None):
        parser.error("give either a MODEL to evaluate or --join RESULT.json … to put results into one table")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if options.join:
        _print_table(options.join, options)
        return 0
    if wants_processes(options):
        from ..compat import accelerator_kind

        # the processes count themselves: a launcher that quietly starts fewer is noticed
        expected = [*argv, "--expect-processes", str(options.num_processes)]
        if options.device == "cpu" or accelerator_kind() is None:
            os.environ["ACCELERATE_USE_CPU"] = "true"  # else every process believes it is alone
        # autocast would change what --dtype says
        return launch("ddp", options.num_processes, expected, ("eval", "wmdp"), ("--mixed_precision", "no"))
    from ..evaluation.wmdp.run import run

    check_out(options.out)
    asked: AbstractContextManager[WmdpRequest] = nullcontext(_request(options))
    if options.smoke:
        from ..toys import wmdp_toys

        asked = wmdp_toys(_request(options))
    with asked as request:
        path = run(request)
    if path is not None:
        text = _print_table([path], options)
        from ..files import write_atomically

        write_atomically(path.with_suffix(".md"), text)
        print(f"\nwrote {path} and {path.with_suffix('.md').name}")
    shutdown()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rosu eval wmdp",
        description="Accuracy on WMDP-Bio, WMDP-Cyber and MMLU (0-shot, lm-eval), and ΔScore = |MMLU − base's MMLU| + "
        "|Bio − 0.25| + |Cyber − 0.25|, with standard errors. Results of the base are cached and reused.",
        epilog="Example: rosu eval wmdp out/zephyr-rosu --base HuggingFaceH4/zephyr-7b-beta --num-processes 4",
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="model folder or hub id")
    parser.add_argument("--base", metavar="MODEL0", help="the model before unlearning, for ΔScore")
    parser.add_argument("--out", type=Path, default=Path("rosu-eval"), metavar="DIR", help="folder for the results")
    parser.add_argument("--name", help="name in tables and of the result file; default: the last part of MODEL")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="a part of wmdp_bio wmdp_cyber mmlu; default: all")
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="local questions: wmdp_bio.jsonl, wmdp_cyber.jsonl, mmlu/SUBJECT.test.jsonl",
    )
    parser.add_argument(
        "--tasks-dir", type=Path, metavar="DIR", help="lm-eval definitions (*.yaml) that take precedence over its own"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="first N questions per task and subject: a trial run")
    parser.add_argument("--batch-size", default="8", metavar="N", help="prompts at once and per process, or 'auto' (8)")
    dtypes = ["auto", "float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", default="auto", choices=dtypes, help="of the weights; auto: as they are stored")
    parser.add_argument("--device", help="cpu, cuda, xpu, npu, mps, or cuda:N; default: what is there")
    parser.add_argument("--num-processes", type=int, metavar="N", help="share the questions among N devices")
    parser.add_argument("--seed", type=seed_number, default=0, help="recorded and set; nothing here is random")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="default: $ROSU_CACHE, else ~/.cache/rosu_llm")
    parser.add_argument("--fresh", action="store_true", help="evaluate the base again although it is cached")
    parser.add_argument("--join", type=Path, nargs="+", metavar="RESULT", help="only print one table of these results")
    parser.add_argument("--format", default="markdown", choices=["markdown", "latex", "json"], help="of the table")
    parser.add_argument(
        "--paper", default="table", choices=["table", "ablation", "none"], help="which of the paper's rows to add"
    )
    parser.add_argument("--smoke", action="store_true", help="toy models and toy questions, to check the rest")
    parser.add_argument("--expect-processes", type=int, help=argparse.SUPPRESS)
    return parser


def _request(options: argparse.Namespace) -> WmdpRequest:
    from ..evaluation.wmdp.evaluate import TASKS, WmdpSettings
    from ..evaluation.wmdp.run import WmdpRequest, default_cache

    settings = WmdpSettings(
        tasks=tuple(dict.fromkeys(options.tasks or TASKS)),
        limit=options.limit,
        dtype=options.dtype,
        device=options.device,
        batch_size=options.batch_size,
        seed=options.seed,
        trust_remote_code=options.trust_remote_code,
    )
    return WmdpRequest(
        model=options.model,
        settings=settings,
        out=options.out,
        cache=options.cache_dir or default_cache(),
        base=options.base,
        name=options.name,
        data_dir=options.data_dir,
        tasks_dir=options.tasks_dir,
        processes=options.expect_processes,
        fresh=options.fresh,
    )


def _print_table(paths: Sequence[Path], options: argparse.Namespace) -> str:
    from ..presentation.wmdp import join
    from ..presentation.writers import render

    table = join(paths, options.paper)
    print(render(table, options.format), end="")
    return render(table, "markdown")
