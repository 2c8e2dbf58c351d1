"""``rosu sweep --out DIR (--config RECIPE | --task demo) (--space FILE | --set key=low..high …) [--key value …]``."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna
    from rich.console import Console

    from ..sweep.task import SweepTask

_TOFU = re.compile(r"(?P<data>.+):(?P<split>forget\d\d)(:train)?")
#: ``--smoke`` runs no more trials than this.
_SMOKE_TRIALS = 2


def main(argv: Sequence[str]) -> int:
    """Search, or only show; 1 if the search stopped because nothing worked."""
    options, rest = _parser().parse_known_args(argv)

    from ..errors import ConfigError

    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ConfigError("rosu sweep needs Optuna: pip install 'rosu-llm[sweep]'.") from error
    from rich.console import Console

    from ..sweep.study import open_study

    name = options.study or options.out.resolve().name
    if options.smoke:  # where it can overwrite nothing real
        options.out, options.storage = options.out / "smoke", None
        if options.show and not options.config:  # there has to be something to show
            options.task, options.set = "demo", options.set or ["rho=0.2,0.4"]
    if options.show and not options.smoke:
        _present(open_study(options.storage, name, options.out, create=False), options.out, Console())
        return 0
    return _search(options, rest, name)


def _search(options: argparse.Namespace, rest: Sequence[str], name: str) -> int:
    from ..ablation.settings import complete
    from ..errors import ConfigError, unknown
    from ..sweep.bar import TrialsBar
    from ..sweep.collect import describe
    from ..sweep.run import KEEP, Sweep, finished, run_sweep
    from ..sweep.sampler import make_pruner, make_sampler
    from ..sweep.space import read_space
    from ..sweep.study import agree, open_study
    from ..training.recipe import type_values

    if options.keep not in KEEP:
        raise unknown("--keep", options.keep, KEEP)
    if options.trials is not None and options.trials < 1:
        raise ConfigError(f"--trials {options.trials} must be at least 1.")
    _quiet()
    values = _values(options, rest)
    given = values.pop("seed", 0)
    seed: int = type_values({"seed": given if options.seed is None else options.seed})[1]["seed"]
    task = _task(options, values, seed)
    space = read_space(options.space, options.set, task.base)
    fractions = [] if options.pruner == "none" else options.report_at
    pruner = make_pruner(options.pruner, options.report_at)
    sampler = make_sampler(options.sampler, space, seed)
    fixed = {key: value for key, value in complete(task.base).items() if key not in space.as_dict()}
    study = open_study(options.storage, name, options.out, create=True)
    agree(study, {"recipe": fixed, "space": space.as_dict(), "seed": seed, "evaluation": task.evaluation()})
    describe(study, task, seed)
    study.pruner = pruner
    trials = _count(options, space)
    sweep = Sweep(study, task, space, options.out, trials, options.timeout, fractions, options.keep)
    with TrialsBar(trials, finished(study)) as bar:
        stopped = run_sweep(sweep, sampler, bar)
    _present(study, options.out, bar.console)
    if stopped:
        bar.console.print(stopped, markup=False, highlight=False, soft_wrap=True)
    return 1 if stopped else 0


def _parser() -> argparse.ArgumentParser:
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
    add("--report-limit", type=int, default=100, metavar="N", help="TOFU: the same for pruning (default 100)")
    add("--fluency-model", metavar="NAME", help="TOFU: classifier of fluency, or 'none' (default: OpenUnlearning's)")
    add("--show", action="store_true", help="run nothing: show the study as it is and write its files")
    add("--smoke", action="store_true", help="two trials at toy size, which only show that everything runs")
    return parser


def _values(options: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    from ..errors import ConfigError, unknown
    from ..training.recipe import read_config, read_flags

    if bool(options.config) == bool(options.task):
        raise ConfigError("Say what to search on: either --config RECIPE.yaml or --task demo.")
    if options.task not in (None, "demo"):
        raise unknown("task", options.task, ("demo",))
    values = {**(read_config(options.config) if options.config else {}), **read_flags(rest)}
    values.pop("output_dir", None)
    return values


def _task(options: argparse.Namespace, values: dict[str, Any], seed: int) -> SweepTask:
    from ..ablation.config_task import ConfigTask
    from ..sweep.answers_task import AnswersTask

    if options.task:
        import torch

        from ..ablation.demo_task import DemoTask
        from ..demo.run import FULL, SMOKE

        torch.set_num_threads(1)  # at this size more threads only wait for each other
        return AnswersTask(DemoTask(SMOKE if options.smoke else FULL, values, options.out / "models"), seed)
    tofu = _TOFU.fullmatch(str(values.get("forget_data")))
    if options.smoke:
        from ..ablation.toy import toy_values

        values = toy_values(values, options.out)
        if tofu:
            from ..sweep.toy import toy_tofu

            values |= toy_tofu(options.out, tofu["split"])
            tofu = _TOFU.fullmatch(values["forget_data"])
    return _tofu_task(options, values, seed, tofu) if tofu else AnswersTask(ConfigTask(values), seed)


def _tofu_task(options: argparse.Namespace, values: dict[str, Any], seed: int, source: re.Match[str]) -> SweepTask:
    from ..evaluation.tofu import fluency
    from ..evaluation.tofu.run import TofuSettings
    from ..sweep.tofu_reference import find
    from ..sweep.tofu_task import TofuEvaluation, TofuTask
    from ..sweep.toy import TOY

    settings = TofuSettings(
        data=options.data or source["data"],
        forget_split=source["split"],
        chat_format=values.get("chat_format"),
        limit=options.eval_limit,
        fluency_model=None if options.fluency_model == "none" else options.fluency_model or fluency.DEFAULT,
    )
    if options.smoke:
        settings = replace(settings, data=source["data"], **TOY)
        options.retain = options.target = None
    if not fluency.available(settings.fluency_model):
        settings = replace(settings, fluency_model=None)
    logging.getLogger("rosu_llm.evaluation.tofu").setLevel(logging.ERROR)  # once is enough, not once per trial
    retain, target = (find(given, source["split"]) if given else None for given in (options.retain, options.target))
    how = TofuEvaluation(settings=settings, glance_limit=options.report_limit, retain=retain, target=target)
    return TofuTask(values, seed, how, options.out / "references")


def _count(options: argparse.Namespace, space: Any) -> int:
    from math import prod

    count: int = options.trials or (prod(len(a.values()) for a in space.axes) if options.sampler == "grid" else 20)
    return min(count, _SMOKE_TRIALS) if options.smoke else count


def _present(study: optuna.Study, out: Path, console: Console) -> None:
    from ..sweep.collect import collect
    from ..sweep.present import DIGITS, write
    from ..sweep.table import screen, sweep_table

    content = collect(study, out)
    table = sweep_table(content)
    console.print(screen(table, content, DIGITS))
    for note in [*table.notes, *(f"[{at}] {note}" for at, note in enumerate(table.footnotes, 1))]:
        console.print(note, markup=False, highlight=False)
    written, missing = write(content, table, out)
    for path in written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if missing:
        console.print(missing, markup=False)


def _quiet() -> None:
    """No chatter between the lines of the trials; one process for each worker."""
    import os

    from transformers.utils import logging as chatter

    from ..errors import ConfigError

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "rosu sweep trains its trials in one process: start it without torchrun or accelerate launch, once for "
            "each GPU (CUDA_VISIBLE_DEVICES); the workers share the study."
        )
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
