"""``rosu audit relearn MODEL --retain R --target T``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from .audited import add_benchmark_flags, add_model_flags, asked, finish, measured
from .common import wants_processes
from .replicas import launch_replicas

#: Cheap enough for a dozen states of three models: one pass over given answers, one of generation.
METRICS = ("forget_Q_A_Prob", "extraction_strength", "exact_memorization", "forget_Q_A_ROUGE", "retain_Q_A_Prob")
_ATTACK = ("epochs", "steps", "learning_rate", "batch_size", "micro_batch", "warmup_steps", "lora_r", "lora_alpha")


def main(argv: Sequence[str]) -> int:
    """Parse, attack, print."""
    options = _parser().parse_args(argv)
    if wants_processes(options):
        return launch_replicas(options, argv, ("audit", "relearn"))

    from ..analysis.relearn.attack import RelearnAttack, check_shares
    from ..analysis.relearn.audit import RelearnRequest, audit_relearn
    from ..analysis.relearn.presets import relearn_preset
    from ..presentation.relearn import relearn_section
    from .progress import stage_bars

    given: dict[str, Any] = {name: value for name in _ATTACK if (value := getattr(options, name)) is not None}
    attack = RelearnAttack(on=options.on, **{**relearn_preset(options.preset), **given})
    shares = tuple(dict.fromkeys(options.share))
    check_shares(shares)
    with asked(options, "relearn") as which, measured(options, which, METRICS) as measure:
        if options.smoke:
            shares = tuple(dict.fromkeys(max(share, 0.5) for share in shares))  # a toy has four rows
            smaller: dict[str, Any] = {"steps": 2, "batch_size": 4, "micro_batch": 2}
            on = options.on if options.on in ("forget", "retain") else f"{which.data}:unrelated"
            attack = RelearnAttack(on=on, learning_rate=attack.learning_rate, lora_r=attack.lora_r and 2, **smaller)
        request = RelearnRequest(
            models=which.models,
            measure=measure,
            attack=attack,
            out=which.out,
            controls=which.controls,
            data=which.data if options.benchmark == "tofu" or options.smoke else None,
            forget_split=options.forget_split,
            shares=shares,
            seeds=tuple(dict.fromkeys(options.seeds)),
            limit=None if options.smoke else options.limit,
            max_length=options.max_length,
            loading=which.loading,
            overwrite=options.overwrite or options.smoke,
        )
        with stage_bars() as progress:
            document = audit_relearn(request, progress)
        return finish(document, relearn_section(document), which.out / "audit_relearn.json")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rosu audit relearn",
        description="Does it come back after a little fine-tuning? The same attack on the unlearned, the retain and "
        "the initial model, measured after 0, 1, 2, 4, 8 … steps. Stop it and the same command goes on.",
        epilog="Example: rosu audit relearn out/rosu --retain out/retain90 --target out/full --share 0.05 0.2 1",
        allow_abbrev=False,
    )
    add_model_flags(parser, dtype="float32")
    add_benchmark_flags(parser)
    parser.add_argument(
        "--on",
        default="forget",
        metavar="forget|retain|SOURCE",
        help="rows to fine-tune on: a share of the forget set (default), the retain set, or other text (benign)",
    )
    parser.add_argument(
        "--share", type=float, nargs="*", default=[1.0], metavar="X", help="shares of the forget set, e.g. 0.05 0.2 1"
    )
    parser.add_argument(
        "--preset",
        default="openunlearning",
        metavar="NAME",
        help="openunlearning (default), smooth_wmdp, smooth_muse or lora; flags take precedence",
    )
    parser.add_argument("--epochs", type=float, metavar="X", help="passes over the rows")
    parser.add_argument("--steps", type=int, metavar="N", help="updates, in place of epochs")
    parser.add_argument("--learning-rate", type=float, metavar="X")
    parser.add_argument("--batch-size", type=int, metavar="N", help="rows per update, over all processes")
    parser.add_argument("--micro-batch", type=int, metavar="N", help="rows at once on each device (8)")
    parser.add_argument("--warmup-steps", type=int, metavar="N")
    parser.add_argument("--lora-r", type=int, metavar="N", help="train an adapter of this rank, not all weights")
    parser.add_argument("--lora-alpha", type=int, metavar="N", help="its scale")
    return parser
