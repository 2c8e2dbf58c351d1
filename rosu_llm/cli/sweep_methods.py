"""``rosu sweep --methods all``: the rows of the paper's Table 3 under one budget."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .common import errors_only

if TYPE_CHECKING:
    from ..experiments.attempt import Task
    from ..experiments.sweep.scoring import Scoring

#: Options of the search with Optuna, which this comparison has not.
_OPTUNA: dict[str, Any] = {"space": None, "set": [], "timeout": None, "storage": None, "study": None, "seed": None}


def run_methods(
    options: argparse.Namespace, values: dict[str, Any], make_task: Callable[..., tuple[Task, Scoring]]
) -> int:
    """Compare, print, and write ``comparison.md``, ``.json`` and the tables into ``--out``."""
    from dataclasses import replace

    from ..experiments.contest import run_contest
    from ..experiments.demo.task import DemoTask
    from ..experiments.demo.world import FULL, SMOKE
    from ..experiments.sweep.scoring import answers_scoring
    from ..experiments.table3 import chosen_rows, table_contest
    from ..files import write_json
    from ..presentation.table3 import table3_section
    from ..presentation.writers import print_section, write_page, write_table
    from .progress import AttemptsBar

    for name, default in _OPTUNA.items():
        if getattr(options, name) != default:
            raise ConfigError(
                f"--{name} has no meaning with --methods, whose rows bring their own settings to search: leave it out."
            )
    rows = chosen_rows(options.methods)
    files = {name: values.pop(name, None) for name in ("alternates", "refusals")}
    kind = "smoke" if options.smoke else options.task or "config"
    if options.smoke and not options.task:
        from ..toys import toy_alternates

        files = {"alternates": toy_alternates(options.out)}
    trials, seeds = (None, None) if options.smoke else (options.trials, options.seeds)
    contest = table_contest(rows, kind, trials, seeds, files)
    if options.task:
        size = replace(SMOKE if options.smoke else FULL, refusals=True)
        task: Task = DemoTask(size, values, options.out / "models")
        scoring = answers_scoring(task)
    else:
        task, scoring = make_task(options, values)
    models = sum(len(task.reference_seeds(seeds)) for seeds in ([contest.search_seed], contest.seeds))
    runs = len(rows) * (contest.trials + len(contest.seeds)) + models * len(task.references)
    with AttemptsBar("runs", runs) as bar, errors_only("rosu_llm.evaluation"):
        document = run_contest(task, contest, options.out, bar, scoring)
    section = table3_section(document, rows)
    print_section(section, bar.console)
    out: Path = options.out
    write_json(out / "comparison.json", {**document, "rows": dict(rows)})
    for name, table in zip(("table3", "search"), section.tables, strict=True):
        write_table(table, out / name)
    write_page(section, out / "comparison.md")
    bar.console.print(f"wrote {out / 'comparison.md'}", highlight=False, soft_wrap=True)
    return 0
