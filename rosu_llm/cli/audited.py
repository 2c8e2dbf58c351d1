"""What ``rosu audit relearn``, ``quantize`` and ``extract`` share: their flags, and what they are asked to measure."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import check_out, present, quiet, seed_number, shutdown
from .replicas import add_loading_flags, add_process_flags, is_first, loading, speak

if TYPE_CHECKING:
    from ..analysis.controls.measures import AuditMeasure
    from ..analysis.controls.models import AuditedModels
    from ..evaluation.tofu.run import Loading
    from ..presentation.blocks import Section


def add_model_flags(parser: argparse.ArgumentParser, *, dtype: str) -> None:
    """The models, where questions come from, how models are loaded, and where results go."""
    from ..data.tofu import DEFAULT_SOURCE

    parser.add_argument("model", metavar="MODEL", help="the unlearned model: folder, LoRA adapter folder or hub id")
    parser.add_argument("--retain", metavar="MODEL", help="control: a model never trained on the forget set")
    parser.add_argument("--target", metavar="MODEL", help="the initial model, before unlearning")
    parser.add_argument("--data", default=DEFAULT_SOURCE, metavar="SOURCE", help="hub id or folder of TOFU's files")
    parser.add_argument("--forget-split", default="forget10", metavar="NAME", help="forget01, forget05 or forget10")
    parser.add_argument("--chat-format", metavar="NAME", help="as in 'rosu eval tofu'")
    parser.add_argument("--limit", type=int, metavar="N", help="first N rows of each data set: a trial run")
    parser.add_argument("--eval-batch-size", type=int, default=64, metavar="N", help="samples at once (64)")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="of a generated answer (200)")
    parser.add_argument("--max-length", type=int, default=512, metavar="N", help="longest sample in tokens (512)")
    add_loading_flags(parser, dtype=dtype)
    parser.add_argument("--seeds", type=seed_number, nargs="+", default=[0], metavar="N", help="default 0")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: audits/NAME; never the model's own)")
    parser.add_argument(
        "--controls",
        type=Path,
        metavar="DIR",
        help="folder for the cells of --retain and --target, shared by audits one after the other (not with --smoke)",
    )
    add_process_flags(parser)
    parser.add_argument("--overwrite", action="store_true", help="begin anew where results of other conditions are")
    parser.add_argument("--smoke", action="store_true", help="toy models and toy questions in DIR/smoke; seconds")


def add_benchmark_flags(parser: argparse.ArgumentParser) -> None:
    """Which benchmark the figures are of."""
    parser.add_argument("--benchmark", default="tofu", choices=["tofu", "wmdp"], help="whose figures (default tofu)")
    parser.add_argument("--metrics", nargs="+", metavar="NAME", help="TOFU: only these, by OpenUnlearning's names")
    parser.add_argument(
        "--held-out-questions", type=int, metavar="N", help="TOFU: first N held-out questions, kept out of all attacks"
    )
    parser.add_argument("--fluency-model", metavar="NAME|PATH", default="none", help="TOFU: classifier, or 'none'")
    parser.add_argument("--tasks", nargs="+", metavar="NAME", help="WMDP: lm-eval tasks (default all three)")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="WMDP: questions as files, in place of the hub")


@dataclass(frozen=True)
class Asked:
    """Models and their data after toys took their places, if ``--smoke`` was given."""

    models: AuditedModels
    data: str
    chat_format: str | None
    loading: Loading
    out: Path
    controls: Path | None = None


@contextmanager
def asked(options: argparse.Namespace, kind: str) -> Iterator[Asked]:
    """Find and check the models; with ``--smoke`` toys in their place."""
    from ..analysis.controls.models import find_models
    from ..evaluation.processes import check_processes
    from ..evaluation.tofu.run import Loading
    from ..toys import audit_toys

    check_processes(options.expect_processes, f"audit {kind}")
    speak(logging.WARNING)
    quiet(threads=1 if options.smoke else None)
    out = options.out or Path("audits") / Path(options.model.rstrip("/")).name
    if options.smoke:
        check_out(out)
        with audit_toys(options.forget_split) as toys:
            given = (options.retain and toys.retain, options.target and toys.target)
            models = find_models(toys.model, *given)
            yield Asked(models, toys.data, toys.chat_format, Loading(dtype="float32"), out / "smoke")
        return
    models = find_models(options.model, options.retain, options.target)
    check_out(out)
    yield Asked(models, options.data, options.chat_format, loading(options), out, options.controls)


@contextmanager
def measured(options: argparse.Namespace, which: Asked, metrics: Sequence[str]) -> Iterator[AuditMeasure]:
    """What is measured of each model: TOFU's ``metrics`` unless others are asked for, or WMDP's tasks."""
    from ..analysis.controls.measures import TofuFigures, wmdp_figures
    from ..evaluation.tofu.metrics import TofuSettings
    from ..evaluation.wmdp.evaluate import TASKS, WmdpSettings

    if options.benchmark == "wmdp":
        tasks = tuple(options.tasks or TASKS)
        asked_for = WmdpSettings(tasks=tasks, limit=options.limit, batch_size=str(options.eval_batch_size))
        data = Path(which.data) if options.smoke else options.data_dir
        with wmdp_figures(asked_for, data) as measure:
            yield measure
        return
    small = options.smoke
    yield TofuFigures(
        TofuSettings(
            data=which.data,
            forget_split=options.forget_split,
            chat_format=which.chat_format,
            batch_size=options.eval_batch_size,
            limit=None if small else options.limit,
            held_out_questions=options.held_out_questions and 1 if small else options.held_out_questions,
            max_new_tokens=5 if small else options.max_new_tokens,
            max_length=options.max_length,
            fluency_model=None if small or options.fluency_model == "none" else options.fluency_model,
            metrics=tuple(dict.fromkeys(options.metrics or metrics)),
        )
    )


def finish(document: Any, section: Section, path: Path) -> int:
    """Write and print on the first process, then leave together."""
    if is_first():
        present(document, section, path)
    shutdown()
    return 0
