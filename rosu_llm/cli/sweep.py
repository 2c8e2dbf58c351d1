"""``rosu sweep --out DIR (--config RECIPE | --task demo) (--space FILE | --set key=low..high …) [--key value …]``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, unknown
from .common import check_out, errors_only, quiet, read_settings, refuse_several_processes

if TYPE_CHECKING:
    import optuna
    from rich.console import Console

    from ..experiments.attempt import Task
    from ..experiments.sweep.scoring import Scoring
    from ..experiments.sweep.space import Space

#: Options of the TOFU evaluation alone.
_TOFU_ONLY = ("target", "retain", "data", "fluency_model", "eval_limit", "held_out_questions", "report_limit")
_TOFU = re.compile(r"(?P<data>.+):(?P<split>forget\d\d)(:train)?")
#: ``--smoke`` runs no more trials than this.
_SMOKE_TRIALS = 2


def main(argv: Sequence[str]) -> int:
    """Search, or only show; 1 if the search stopped because nothing worked."""
    options, rest = _parser().parse_known_args(argv)
    _check(options)
    if options.methods:
        from .sweep_methods import run_methods

        refuse_several_processes(
            "rosu sweep trains in one process: start it without torchrun or accelerate launch, once for each GPU."
        )
        quiet(threads=1 if options.task else None)
        options.out = options.out / "smoke" if options.smoke else options.out
        return run_methods(options, _values(options, rest), _task)
    if options.seeds:
        raise ConfigError("--seeds is for --methods; a search has one --seed.")
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
    from ..experiments.config_task import complete
    from ..experiments.sweep.collect import describe
    from ..experiments.sweep.sampler import make_pruner, make_sampler
    from ..experiments.sweep.search import KEEP, Sweep, finished, run_sweep
    from ..experiments.sweep.space import read_space
    from ..experiments.sweep.study import open_study, pin_conditions, start_over
    from ..recipes.settings import type_values
    from ..training.supported import check_seed
    from .progress import AttemptsBar

    if options.keep not in KEEP:
        raise unknown("--keep", options.keep, KEEP)
    refuse_several_processes(
        "rosu sweep trains its trials in one process: start it without torchrun or accelerate launch, once for each "
        "GPU (CUDA_VISIBLE_DEVICES); the workers share the study."
    )
    quiet(threads=1 if options.task else None)
    values = _values(options, rest)
    given = values.pop("seed", 0)
    seed: int = type_values({"seed": given if options.seed is None else options.seed})[1]["seed"]
    check_seed("seed", seed)
    task, scoring = _task(options, values)
    space = read_space(options.space, options.set, task.base)
    fractions = [] if options.pruner == "none" else options.report_at
    pruner = make_pruner(options.pruner, options.report_at)
    sampler = make_sampler(options.sampler, space, seed)
    recipe = complete(task.base)
    fixed = {key: value for key, value in recipe.items() if key not in space.as_dict()}
    conditions = {"recipe": fixed, "space": space.as_dict(), "seed": seed, "evaluation": task.identity(recipe)}
    if options.smoke:
        start_over(options.out)
    study = open_study(options.storage, name, options.out, create=True)
    pin_conditions(study, conditions)
    describe(study, scoring, task.base, seed)
    study.pruner = pruner
    trials = _count(options, space, study)
    sweep = Sweep(
        *(study, task, scoring, seed, space, conditions, options.out, trials),
        timeout=options.timeout,
        fractions=fractions,
        keep=options.keep,
    )
    # Notices of the evaluation would repeat with every trial.
    with AttemptsBar("trials", trials, finished(study), counts_failed=False) as bar, errors_only("rosu_llm.evaluation"):
        stopped = run_sweep(sweep, sampler, bar)
    _present(study, options.out, bar.console)
    if stopped:
        bar.console.print(stopped, markup=False, highlight=False, soft_wrap=True)
    return 1 if stopped else 0


def _values(options: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    if bool(options.config) == bool(options.task):
        raise ConfigError("Say what to search on: either --config RECIPE.yaml or --task demo.")
    if options.task not in (None, "demo"):
        raise unknown("task", options.task, ("demo",))
    values = read_settings(options.config, rest)
    values.pop("output_dir", None)
    return values


def _task(options: argparse.Namespace, values: dict[str, Any]) -> tuple[Task, Scoring]:
    from ..data.sources import named_rows
    from ..experiments.config_task import ConfigTask
    from ..experiments.sweep.scoring import answers_scoring

    asked = str(values.get("forget_data"))
    tofu = None if options.task else _TOFU.fullmatch(asked)
    if not tofu and not options.task and _TOFU.fullmatch(named_rows(asked)[0]):
        raise ConfigError(
            f"forget_data={asked!r} names some rows of a TOFU split, and trials are evaluated on whole ones: give the "
            "split, with --eval-limit N for a smaller evaluation, or the rows as a file of your own."
        )
    if not tofu:
        _check_without_tofu(options)
    if options.task:
        from ..experiments.demo.task import DemoTask
        from ..experiments.demo.world import FULL, SMOKE

        demo = DemoTask(SMOKE if options.smoke else FULL, values, options.out / "models")
        return demo, answers_scoring(demo)
    if options.smoke:
        from ..toys import toy_tofu, toy_values

        values = toy_values(values, options.out)
        if tofu:
            values |= toy_tofu(options.out, tofu["split"])
            tofu = _TOFU.fullmatch(values["forget_data"])
    if tofu:
        return _tofu_task(options, values, tofu)
    task = ConfigTask(values)
    return task, answers_scoring(task)


def _tofu_task(options: argparse.Namespace, values: dict[str, Any], source: re.Match[str]) -> tuple[Task, Scoring]:
    from ..evaluation.tofu.generation import CLASSIFIER, classifier_available
    from ..evaluation.tofu.metrics import TofuSettings
    from ..experiments.sweep.tofu import TofuEvaluation, TofuTask, find, tofu_scoring
    from ..toys import TOY_EVALUATION

    settings = TofuSettings(
        data=options.data or source["data"],
        forget_split=source["split"],
        chat_format=values.get("chat_format"),
        limit=options.eval_limit,
        held_out_questions=options.held_out_questions,
        fluency_model=None if options.fluency_model == "none" else options.fluency_model or CLASSIFIER,
    )
    if options.smoke:
        settings = replace(
            settings, data=source["data"], held_out_questions=options.held_out_questions and 1, **TOY_EVALUATION
        )
        options.retain = options.target = None
    if not classifier_available(settings.fluency_model):
        settings = replace(settings, fluency_model=None)
    retain, target = (find(given, settings) if given else None for given in (options.retain, options.target))
    glance = options.report_limit or TofuEvaluation.glance_limit
    how = TofuEvaluation(settings=settings, glance_limit=glance, retain=retain, target=target)
    return TofuTask(values, how, options.out / "references"), tofu_scoring(how)


def _count(options: argparse.Namespace, space: Space, study: optuna.Study) -> int:
    from ..experiments.sweep.sampler import grid_size

    count: int = options.trials or (grid_size(space, study) if options.sampler == "grid" else 20)
    return min(count, _SMOKE_TRIALS) if options.smoke else count


def _present(study: optuna.Study, out: Path, console: Console) -> None:
    from ..experiments.sweep.collect import collect
    from ..presentation.sweep import narrow, sweep_table, write_sweep
    from ..presentation.writers import print_table

    content = collect(study, out)
    print_table(narrow(sweep_table(content), content), console)
    written, missing = write_sweep(content, out)
    for path in written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if missing:
        console.print(missing, markup=False)


def _parser() -> argparse.ArgumentParser:
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
    add(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="in place of a search: the rows of the paper's Table 3, each with the same number of trials, or 'all'",
    )
    add("--seeds", type=int, nargs="+", metavar="N", help="--methods: seeds that the selected settings are run on")
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
    add("--held-out-questions", type=int, metavar="N", help="TOFU: first held-out questions, kept out of all attacks")
    add("--report-limit", type=int, metavar="N", help="TOFU: the same for pruning (default 100)")
    add("--fluency-model", metavar="NAME", help="TOFU: classifier of fluency, or 'none' (default: OpenUnlearning's)")
    add("--show", action="store_true", help="run nothing: show the study as it is and write its files")
    add("--smoke", action="store_true", help="two trials at toy size, which only show that everything runs")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raise for numbers that make no search, and for an ``--out`` that cannot be a folder."""
    for path in (options.out, *options.out.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--out {options.out} cannot be a folder, as {path} is a file: give another.")
    check_out(options.out)
    for key in ("trials", "eval_limit", "held_out_questions", "report_limit"):
        count = getattr(options, key)
        if count is not None and count < 1:
            raise ConfigError(f"{_flag(key)} {count} must be at least 1: leave it out for the default.")
    if options.timeout is not None and not options.timeout > 0:
        raise ConfigError(f"--timeout {options.timeout:g} leaves no time for a trial: give seconds above 0.")


def _check_without_tofu(options: argparse.Namespace) -> None:
    """Raise for options that only the evaluation of TOFU reads."""
    given = [_flag(key) for key in _TOFU_ONLY if getattr(options, key) is not None]
    if given:
        raise ConfigError(
            f"{', '.join(given)} would be ignored: only TOFU is evaluated with it, that is a recipe with forget_data: "
            "SOURCE:forgetNN. Leave it out."
        )


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"
