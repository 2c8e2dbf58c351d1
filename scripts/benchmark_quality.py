"""A fair comparison of methods on one task: the same search for each, selected by Agg_MU, reported on fresh seeds.

    python scripts/benchmark_quality.py --task people --out outputs/benchmark/people
    python scripts/benchmark_quality.py --task authors --model DIR --retain-model DIR --data DIR --out DIR
    python scripts/benchmark_quality.py --smoke --out DIR     # a toy world and two methods: shows that it runs

``scripts/benchmark_quality.sh`` makes the models and data of the tasks and calls this. Stop it whenever you like: the
same command goes on with the first run that is not finished.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

#: Task → the learning rates and lengths that every method tries, the number of trials, and the reported seeds.
#: ``values`` are tried there in place of the methods' usual ones, which are for larger models.
TASKS: dict[str, dict[str, Any]] = {
    "people": {
        "common": {"learning_rate": (2e-4, 5e-4, 1e-3, 2e-3), "num_train_epochs": (10, 20, 40)},
        "trials": 6,
        "seeds": (0, 1, 2, 3, 4),
    },
    "authors": {
        "common": {"learning_rate": (5e-5, 1e-4, 2e-4, 3e-4), "num_train_epochs": (5, 10)},
        "values": {"rho": (0.02, 0.05, 0.1, 0.4)},
        "trials": 4,
        "seeds": (0, 1, 2),
    },
    "instruct": {
        "common": {"learning_rate": (5e-5, 1e-4, 2e-4), "num_train_epochs": (5,)},
        "values": {"rho": (0.05, 0.1, 0.4), "kappa": (0.05, 0.1, 0.25)},
        "trials": 3,
        "seeds": (0, 1, 2),
    },
}
SEARCH_SEED = 10


def make_task(options: argparse.Namespace) -> Any:
    """The embedded people, or a model that has learned TOFU authors."""
    from rosu_llm.errors import ConfigError
    from rosu_llm.experiments.config_task import ConfigTask
    from rosu_llm.experiments.demo.task import DemoTask
    from rosu_llm.experiments.demo.world import FULL, SMOKE

    if options.task == "people":
        return DemoTask(SMOKE if options.smoke else FULL, {}, options.out / "models")
    if not (options.model and options.retain_model and options.data):
        raise ConfigError(
            f"--task {options.task} needs --model, --retain-model and --data: benchmark_quality.sh makes them."
        )
    values = {
        "model_name_or_path": options.model,
        "forget_data": f"{options.data}:forget01",
        "retain_data": f"{options.data}:retain99",
        "holdout_data": f"{options.data}:level",
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 32,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "use_cpu": options.use_cpu,
        "bf16": options.bf16,
    }
    if options.task == "instruct":
        values |= {"chat_format": "tokenizer", "per_device_train_batch_size": 4}
    return ConfigTask(values, retain_model=options.retain_model, unseen_data=f"{options.data}:holdout01")


def main() -> int:
    """Run, print and write ``comparison.md``, ``comparison.json`` and the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="people")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="contestants; default: all")
    parser.add_argument("--trials", type=int, help="settings that each method tries")
    parser.add_argument("--seeds", type=int, nargs="+", help=f"reported seeds; {SEARCH_SEED} is the searched one")
    parser.add_argument("--model", help="the model that learned everything")
    parser.add_argument("--retain-model", help="the model that never learned the forget data")
    parser.add_argument("--data", help="a folder of TOFU's files")
    parser.add_argument("--use-cpu", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="train in mixed precision; models are measured in float32")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    from rosu_llm.cli.common import quiet
    from rosu_llm.cli.progress import AttemptsBar
    from rosu_llm.errors import RosuError
    from rosu_llm.experiments.contest import BENCHMARKED, Contest, run_contest
    from rosu_llm.files import write_json
    from rosu_llm.presentation.contest import contest_section
    from rosu_llm.presentation.writers import print_section, write_page, write_table

    plan = dict(TASKS[options.task])
    names = options.methods or (["rosu_paper_bounded", "graddiff"] if options.smoke else list(BENCHMARKED))
    if options.smoke:
        plan.update(common={"learning_rate": (1e-3, 2e-3), "num_train_epochs": (1,)}, trials=2, seeds=(0, 1))
    try:
        quiet(threads=1 if options.task == "people" else None)
        contest = Contest(
            names,
            plan["common"],
            options.trials or plan["trials"],
            SEARCH_SEED,
            options.seeds or plan["seeds"],
            values=plan.get("values", {}),
        )
        task = make_task(options)
        models = sum(len(task.reference_seeds(seeds)) for seeds in ([SEARCH_SEED], contest.seeds)) * len(
            task.references
        )
        with AttemptsBar("runs", len(names) * (contest.trials + len(contest.seeds)) + models) as bar:
            document = run_contest(task, contest, options.out, bar)
    except RosuError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    section = contest_section(document)
    print_section(section, bar.console)
    write_json(options.out / "comparison.json", document)
    for name, table in zip(("figures", "scores", "search"), section.tables, strict=True):
        write_table(table, options.out / name)
    write_page(section, options.out / "comparison.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
