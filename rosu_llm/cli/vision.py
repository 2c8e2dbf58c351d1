"""``rosu vision run|table|ablate|diagnose|audit --config FILE [--out DIR] [--key value …]``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import check_out, quiet, read_settings, refuse_several_processes, seed_number

if TYPE_CHECKING:
    from ..vision.table import VisionDocument
    from ..vision.task import VisionTask

ACTIONS = {
    "run": "unlearn with some methods and compare with the retrained model",
    "table": "a table of the paper: every method with the same number of trials, selected on validation images",
    "ablate": "components, jacobian (A1, A2), rank, rho, retain_batch",
    "diagnose": "coupling of forget and retain gradients at full batch and by batch size",
    "audit": "how neutral a mini-batch's direction is for all retain images, by batch size",
}
#: Option → the actions that have it.
_OPTIONS = {
    "methods": ("run", "table"),
    "trials": ("table",),
    "search_seed": ("table",),
    "grid": ("ablate",),
    "pairs": ("diagnose", "audit"),
    "batch_sizes": ("audit",),
    "rhos": ("diagnose",),
    "points": ("diagnose",),
    "retry_failed": ("run", "table", "ablate"),
}
#: Split of a table's search, unless it is given or there are fewer classes.
_SEARCH_SEED = 9
#: What --smoke runs of a table, unless methods are given.
_SMOKE_ROWS = ("ff", "rosu")


def main(argv: Sequence[str]) -> int:
    """Train what is not there yet, measure, show, write; 1 if any cell failed."""
    options, rest = _parser().parse_known_args(argv)
    _check_options(options)
    refuse_several_processes("rosu vision runs in one process: start it without torchrun or accelerate launch.")
    check_out(options.out)
    values = read_settings(options.config, rest)
    quiet()
    if options.smoke:
        from ..vision.toy import toy_settings

        values = toy_settings(values)
    seed = int(values.pop("seed", 0))
    seeds = [seed] if options.seeds is None else options.seeds
    if options.smoke:  # a toy has three classes
        seeds, options.search_seed = [0], 1
    return _ACTIONS[options.action](options, values, seeds)


def _check_options(options: argparse.Namespace) -> None:
    """Raise for an option that the action would not look at."""
    from ..errors import ConfigError

    for name, actions in _OPTIONS.items():
        if getattr(options, name) is not None and options.action not in actions:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} belongs to rosu vision {' and '.join(actions)}, not to {options.action}.")
    seeds = options.seeds or []
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {' '.join(map(str, seeds))}: every seed once.")
    if options.action in ("diagnose", "audit") and len(seeds) > 1:
        raise ConfigError(f"--seeds {' '.join(map(str, seeds))}: {options.action} measures one split; give one seed.")


def _tasks(
    options: argparse.Namespace,
    values: dict[str, Any],
    protocols: Sequence[str],
    seeds: Sequence[int],
    *,
    curves: bool = False,
) -> list[VisionTask]:
    """One per protocol, all of them checked before the first does anything; images are read once."""
    from ..vision.task import VisionTask
    from ..vision.toy import toy_images

    images, tasks = toy_images() if options.smoke else None, []
    for protocol in protocols:
        own = {**values, "protocol": protocol}
        task = VisionTask(own, options.out / "models", images, curves=curves, seeds=seeds)
        images = (task.bench.train, task.bench.test)
        tasks.append(task)
    return tasks


def _run(options: argparse.Namespace, values: dict[str, Any], seeds: list[int]) -> int:
    from ..vision.rows import given_settings
    from ..vision.table import check_rows, run_table

    names = options.methods or ["rosu"]
    check_rows(names)
    given = given_settings(values, names)
    (task,) = _tasks(options, values, [values.get("protocol", "random")], seeds)
    retry = bool(options.retry_failed)
    with _bar((len(names) + 2) * len(seeds)) as bar:
        document = run_table(task, names, seeds, options.out, bar, settings=given, retry_failed=retry)
    return _show([(document, "methods", f"run_{document['setup']['protocol']}")], options.out)


def _table(options: argparse.Namespace, values: dict[str, Any], seeds: list[int]) -> int:
    from ..vision.rows import PAPER_ROWS, TRIALS, check_trials, given_settings, trials
    from ..vision.table import check_rows, check_table, run_table

    names = options.methods or list(_SMOKE_ROWS if options.smoke else PAPER_ROWS)
    check_rows(names)
    count = TRIALS if options.trials is None else options.trials
    check_trials(count)
    count = min(count, 1) if options.smoke else count
    given = given_settings(values, names, search=True)
    values = {key: value for key, value in values.items() if not isinstance(given.get(key), tuple)}
    plans = []
    for task in _tasks(options, values, _protocols(values), seeds):
        search = (count, _search_seed(options, task)) if count else None
        check_table(task, names, seeds, search, given)
        plans.append((task, search))
    shown = []
    for task, search in plans:
        protocol = task.bench.arguments.protocol
        searched = sum(len(trials(name, protocol, count, given)) for name in names) + 2 if search else 0
        with _bar((len(names) + 2) * len(seeds) + searched) as bar:
            document = run_table(
                task,
                names,
                seeds,
                options.out,
                bar,
                search=search,
                settings=given,
                retry_failed=bool(options.retry_failed),
            )
        shown.append((document, "methods", f"table_{protocol}"))
    return _show(shown, options.out)


def _search_seed(options: argparse.Namespace, task: VisionTask) -> int:
    if options.search_seed is not None:
        return int(options.search_seed)
    classwise = task.bench.arguments.protocol == "classwise"
    return min(_SEARCH_SEED, len(task.bench.train.classes) - 1) if classwise else _SEARCH_SEED


def _ablate(options: argparse.Namespace, values: dict[str, Any], seeds: list[int]) -> int:
    from ..vision.ablate import check_grid, run_ablation, vision_grid
    from ..vision.rows import given_settings

    given_settings(values, ["rosu"])  # refuses another method
    names = list(dict.fromkeys(name.strip() for name in (options.grid or "components").split(",")))
    protocols = _protocols(values)
    grids = {protocol: [vision_grid(name, protocol, values) for name in names] for protocol in protocols}
    tasks = _tasks(options, values, protocols, seeds, curves=True)
    for task in tasks:
        for grid in grids[task.bench.arguments.protocol]:
            check_grid(task, grid, seeds)
    shown = []
    for task in tasks:
        for grid in grids[task.bench.arguments.protocol]:
            with _bar((len(grid.variants) + 2) * len(seeds)) as bar:
                document = run_ablation(task, grid, seeds, options.out, bar, retry_failed=bool(options.retry_failed))
            shown.append((document, grid.title, f"{grid.name}_{task.bench.arguments.protocol}"))
    return _show(shown, options.out)


def _diagnose(options: argparse.Namespace, values: dict[str, Any], seeds: list[int]) -> int:
    from ..presentation.coupling import print_diagnosis, write_diagnosis
    from ..vision.diagnose import diagnose_vision
    from .progress import stage_bars

    asked = {name: getattr(options, name) for name in ("pairs", "points")}
    asked["rhos"] = None if options.rhos is None else tuple(options.rhos)
    if options.smoke:
        asked |= {"pairs": 2, "points": 0}
    (seed,) = seeds
    for task in _tasks(options, values, _protocols(values), seeds):
        with stage_bars() as bars:
            found = diagnose_vision(
                task.bench, asked, seed=seed, steps=lambda done, total: bars("training", done, total)
            )
        print_diagnosis(found.document)
        for path in write_diagnosis(found.document, options.out / task.bench.arguments.protocol):
            print(f"wrote {path}")
    return 0


def _audit(options: argparse.Namespace, values: dict[str, Any], seeds: list[int]) -> int:
    from ..presentation.audits import orthogonality_section
    from ..vision.diagnose import audit_vision, orthogonality_plan
    from .common import present
    from .progress import stage_bars

    pairs, sizes = 500 if options.pairs is None else options.pairs, options.batch_sizes or ()
    if options.smoke:
        pairs, sizes = 3, (2, 8)
    (seed,) = seeds
    benches = [task.bench for task in _tasks(options, values, _protocols(values), seeds)]
    plans = [orthogonality_plan(bench, seed=seed, pairs=pairs, batch_sizes=sizes) for bench in benches]
    for bench, plan in zip(benches, plans, strict=True):
        folder = options.out / bench.arguments.protocol / f"seed{seed}"
        with stage_bars() as bars:
            document = audit_vision(bench, plan, folder, bars)
        assert document is not None  # one process
        present(document, orthogonality_section(document), folder / "audit_orthogonality.json")
    return 0


_ACTIONS = {"run": _run, "table": _table, "ablate": _ablate, "diagnose": _diagnose, "audit": _audit}


def _protocols(values: dict[str, Any]) -> list[str]:
    """The one that was asked for, or both."""
    from ..errors import unknown
    from ..vision.splits import PROTOCOLS

    if "protocol" not in values:
        return list(PROTOCOLS)
    if values["protocol"] not in PROTOCOLS:
        raise unknown("protocol", values["protocol"], PROTOCOLS)
    return [values["protocol"]]


def _bar(cells: int) -> Any:
    from .progress import AttemptsBar

    return AttemptsBar("cells", cells)


def _show(documents: Sequence[tuple[VisionDocument, str, str]], out: Path) -> int:
    from rich.console import Console

    from ..presentation.vision import vision_section, write_vision
    from ..presentation.writers import print_section

    console, failed = Console(), 0
    for document, title, key in documents:
        section = vision_section(document, title, key)
        print_section(section, console)
        for path in write_vision(document, section, out):
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)
        failed += sum(bool(row["errors"]) for row in document["rows"])
    if failed:
        console.print("Some cells failed: mend the cause, and pass --retry-failed to run them again.", highlight=False)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rosu vision",
        description="Unlearning of image classifiers: the paper's other half. Settings are those of docs/vision.md and "
        "of 'rosu train', as a YAML file and flags: --width 16 --rho 0.5. Trained models and finished cells are kept "
        "in DIR and not made again.",
        epilog="\n".join(["actions:", *(f"  {name:<10}{text}" for name, text in ACTIONS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=list(ACTIONS), metavar="action", help="one of those below")
    parser.add_argument("--config", metavar="FILE", help="YAML file, e.g. configs/vision/cifar10_cpu.yaml")
    parser.add_argument("--out", type=Path, default=Path("rosu-vision"), metavar="DIR", help="folder for everything")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="run, table: rows (run: rosu; table: the paper's)")
    parser.add_argument("--seeds", type=seed_number, nargs="+", metavar="N", help="splits; class-wise: classes (0)")
    parser.add_argument("--trials", type=int, metavar="N", help="table: per method (8); 0: no search")
    parser.add_argument("--search-seed", type=seed_number, metavar="N", help="table: split of the search (9)")
    parser.add_argument(
        "--grid", metavar="NAMES", help="ablate: components (default), jacobian, rank, rho, retain_batch"
    )
    parser.add_argument("--pairs", type=int, metavar="N", help="mini-batch pairs (diagnose: 16; audit: 500 per size)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", metavar="N", help="audit: retain images (64 128 256 …)")
    parser.add_argument("--rhos", type=float, nargs="+", metavar="R", help="diagnose: radii (0.1 0.2 0.4 0.8)")
    parser.add_argument("--points", type=int, metavar="N", help="diagnose: further radii of the curves (8)")
    parser.add_argument(
        "--retry-failed", action="store_true", default=None, help="run, table, ablate: run failed cells again"
    )
    parser.add_argument("--smoke", action="store_true", help="a toy size that only shows that everything runs")
    return parser
