"""The options of ``rosu sweep``, and which of them cannot work."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import ConfigError

#: Of the TOFU evaluation alone.
_TOFU_ONLY = ("target", "retain", "data", "fluency_model", "eval_limit", "report_limit")


def make_parser() -> argparse.ArgumentParser:
    """All options; settings of rosu train are left over."""
    parser = argparse.ArgumentParser(
        prog="rosu sweep",
        description="Search settings of 'rosu train' with Optuna. Every trial trains and is evaluated; Agg_MU, the "
        "harmonic mean of memorisation and utility, is the only thing it is judged by. The study is kept in DIR and "
        "goes on where it was interrupted; several processes may work on one study. Settings given as flags hold for "
        "all trials: --num-train-epochs 5.",
        epilog="Example: rosu sweep --config configs/recipes/tofu_llama-3.2-1b.yaml --space "
        "configs/sweeps/tofu_llama-3.2-1b.yaml --out sweep --trials 30",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the study, models, table and plot")
    add("--config", metavar="FILE", help="what to search on: a configuration of 'rosu train'")
    add("--task", metavar="NAME", help="demo: the embedded people of 'rosu demo', without --config")
    add("--space", metavar="FILE", help="YAML: key: [a, b] or key: {low: …, high: …, log: true, step: …}")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=SPACE",
        help="the same for one key: rho=0.1..0.8, learning_rate=1e-6..1e-4:log, num_train_epochs=2..10:2, method=a,b",
    )
    add(
        "--trials",
        type=int,
        metavar="N",
        help="finished or pruned trials of the study, all processes together (default 20; grid: all combinations)",
    )
    add("--timeout", type=float, metavar="SECONDS", help="start no trial after this time")
    add("--storage", metavar="URL", help="any Optuna storage, for several machines (default: DIR/study.db)")
    add("--study", metavar="NAME", help="name of the study (default: that of DIR)")
    add("--seed", type=int, metavar="N", help="of the search and of every trial (default: the configuration's)")
    add("--sampler", default="tpe", metavar="NAME", help="tpe (default), random or grid")
    add("--pruner", default="median", metavar="NAME", help="median (default), hyperband or none")
    add(
        "--report-at",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 0.75],
        metavar="X",
        help="fractions of a run at which it may be pruned (default 0.25 0.5 0.75)",
    )
    add("--keep", default="best", metavar="NAME", help="models to keep: best (default), all or none")
    add("--retain", metavar="PATH", help="TOFU: results of the retain model, or the model (for Priv)")
    add("--target", metavar="PATH", help="TOFU: results of the initial model, or the model (Util relative to it)")
    add("--data", metavar="PATH", help="TOFU: folder or hub id to evaluate on (default: that of forget_data)")
    add("--eval-limit", type=int, metavar="N", help="TOFU: evaluate on the first N questions of every data set")
    add("--report-limit", type=int, metavar="N", help="TOFU: the same for pruning (default 100)")
    add("--fluency-model", metavar="NAME", help="TOFU: classifier of fluency, or 'none' (default: OpenUnlearning's)")
    add("--show", action="store_true", help="run nothing: show the study as it is and write its files")
    add("--smoke", action="store_true", help="two trials at toy size, which only show that everything runs")
    return parser


def check(options: argparse.Namespace) -> None:
    """Raise for numbers that make no search, and for an ``--out`` that cannot be a folder."""
    for path in (options.out, *options.out.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--out {options.out} cannot be a folder, as {path} is a file: give another.")
    for key in ("trials", "eval_limit", "report_limit"):
        count = getattr(options, key)
        if count is not None and count < 1:
            raise ConfigError(f"{_flag(key)} {count} must be at least 1: leave it out for the default.")
    if options.timeout is not None and not options.timeout > 0:
        raise ConfigError(f"--timeout {options.timeout:g} leaves no time for a trial: give seconds above 0.")


def check_without_tofu(options: argparse.Namespace) -> None:
    """Raise for options that only the evaluation of TOFU reads."""
    given = [_flag(key) for key in _TOFU_ONLY if getattr(options, key) is not None]
    if given:
        raise ConfigError(
            f"{', '.join(given)} would be ignored: only TOFU is evaluated with it, that is a recipe with forget_data: "
            "SOURCE:forgetNN. Leave it out."
        )


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"
