"""``rosu sweep --out DIR (--config RECIPE | --task demo) (--space FILE | --set key=low..high …) [--key value …]``."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, unknown
from .sweep_options import check, check_without_tofu, make_parser

if TYPE_CHECKING:
    import optuna
    from rich.console import Console

    from ..experiments.sweep.space import Space
    from ..experiments.sweep.task import SweepTask

_TOFU = re.compile(r"(?P<data>.+):(?P<split>forget\d\d)(:train)?")
#: ``--smoke`` runs no more trials than this.
_SMOKE_TRIALS = 2


def main(argv: Sequence[str]) -> int:
    """Search, or only show; 1 if the search stopped because nothing worked."""
    options, rest = make_parser().parse_known_args(argv)
    check(options)
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ConfigError("rosu sweep needs Optuna: pip install 'rosu-llm[sweep]'.") from error
    from rich.console import Console

    from ..experiments.sweep.study import open_study

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
    from ..experiments.settings import complete
    from ..experiments.sweep.collect import describe
    from ..experiments.sweep.sampler import make_pruner, make_sampler
    from ..experiments.sweep.search import KEEP, Sweep, finished, run_sweep
    from ..experiments.sweep.space import read_space
    from ..experiments.sweep.study import agree, open_study, start_over
    from ..recipes.settings import type_values
    from .trials_bar import TrialsBar

    if options.keep not in KEEP:
        raise unknown("--keep", options.keep, KEEP)
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
    conditions = {"recipe": fixed, "space": space.as_dict(), "seed": seed, "evaluation": task.evaluation()}
    if options.smoke:
        start_over(options.out)
    study = open_study(options.storage, name, options.out, create=True)
    agree(study, conditions)
    describe(study, task, seed)
    study.pruner = pruner
    trials = _count(options, space, study)
    sweep = Sweep(study, task, space, conditions, options.out, trials, options.timeout, fractions, options.keep)
    with TrialsBar(trials, finished(study)) as bar:
        stopped = run_sweep(sweep, sampler, bar)
    _present(study, options.out, bar.console)
    if stopped:
        bar.console.print(stopped, markup=False, highlight=False, soft_wrap=True)
    return 1 if stopped else 0


def _values(options: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    from ..recipes.settings import read_config, read_flags

    if bool(options.config) == bool(options.task):
        raise ConfigError("Say what to search on: either --config RECIPE.yaml or --task demo.")
    if options.task not in (None, "demo"):
        raise unknown("task", options.task, ("demo",))
    values = {**(read_config(options.config) if options.config else {}), **read_flags(rest)}
    values.pop("output_dir", None)
    return values


def _task(options: argparse.Namespace, values: dict[str, Any], seed: int) -> SweepTask:
    from ..experiments.config_task import ConfigTask
    from ..experiments.sweep.answers_task import AnswersTask

    tofu = None if options.task else _TOFU.fullmatch(str(values.get("forget_data")))
    if not tofu:
        check_without_tofu(options)
    if options.task:
        import torch

        from ..experiments.demo.run import FULL, SMOKE
        from ..experiments.demo.task import DemoTask

        torch.set_num_threads(1)  # at this size more threads only wait for each other
        return AnswersTask(DemoTask(SMOKE if options.smoke else FULL, values, options.out / "models"), seed)
    if options.smoke:
        from ..toys.recipe import toy_values

        values = toy_values(values, options.out)
        if tofu:
            from ..toys.sweep import toy_tofu

            values |= toy_tofu(options.out, tofu["split"])
            tofu = _TOFU.fullmatch(values["forget_data"])
    return _tofu_task(options, values, seed, tofu) if tofu else AnswersTask(ConfigTask(values), seed)


def _tofu_task(options: argparse.Namespace, values: dict[str, Any], seed: int, source: re.Match[str]) -> SweepTask:
    from ..evaluation.tofu import fluency
    from ..evaluation.tofu.run import TofuSettings
    from ..experiments.sweep.tofu_reference import find
    from ..experiments.sweep.tofu_task import TofuEvaluation, TofuTask
    from ..toys.sweep import TOY

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
    glance = options.report_limit or TofuEvaluation.glance_limit
    how = TofuEvaluation(settings=settings, glance_limit=glance, retain=retain, target=target)
    return TofuTask(values, seed, how, options.out / "references")


def _count(options: argparse.Namespace, space: Space, study: optuna.Study) -> int:
    from ..experiments.sweep.sampler import grid_size

    count: int = options.trials or (grid_size(space, study) if options.sampler == "grid" else 20)
    return min(count, _SMOKE_TRIALS) if options.smoke else count


def _present(study: optuna.Study, out: Path, console: Console) -> None:
    from ..experiments.sweep.collect import collect
    from ..presentation.sweep import DIGITS, write
    from ..presentation.sweep_table import screen, sweep_table

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

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "rosu sweep trains its trials in one process: start it without torchrun or accelerate launch, once for "
            "each GPU (CUDA_VISIBLE_DEVICES); the workers share the study."
        )
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
