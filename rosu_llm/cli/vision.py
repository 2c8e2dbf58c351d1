"""``rosu vision run|table|ablate|diagnose --config FILE [--out DIR] [--key value …]``."""

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
}
#: What --smoke runs of a table, unless methods are given.
_SMOKE_ROWS = ("ff", "rosu")


def main(argv: Sequence[str]) -> int:
    """Train what is not there yet, measure, show, write; 1 if any cell failed."""
    options, rest = _parser().parse_known_args(argv)
    refuse_several_processes("rosu vision runs in one process: start it without torchrun or accelerate launch.")
    check_out(options.out)
    values = read_settings(options.config, rest)
    quiet()
    if options.smoke:
        from ..vision.toy import toy_settings

        values = toy_settings(values)
    seed = int(values.pop("seed", 0))
    seeds = [seed] if options.seeds is None else options.seeds
    seeds = seeds[:1] if options.smoke else seeds
    return _ACTIONS[options.action](options, values, seeds)


def _task(
    options: argparse.Namespace, values: dict[str, Any], protocol: str | None = None, *, curves: bool = False
) -> VisionTask:
    from ..vision.task import VisionTask
    from ..vision.toy import toy_images

    own = values if protocol is None else {**values, "protocol": protocol}
    return VisionTask(own, options.out / "models", toy_images() if options.smoke else None, curves=curves)


def _run(options: argparse.Namespace, values: dict[str, Any], seeds: list[int]) -> int:
    from ..vision.rows import given_settings
    from ..vision.table import check_rows, run_table

    names = options.methods or ["rosu"]
    check_rows(names)
    given = given_settings(values, names, search=False)
    task = _task(options, values)
    with _bar((len(names) + 2) * len(seeds)) as bar:
        document = run_table(task, names, seeds, options.out, bar, settings=given)
    return _show([(document, "methods", f"run_{document['setup']['protocol']}")], options.out)


def _table(options: argparse.Namespace, values: dict[str, Any], seeds: list[int]) -> int:
    from ..vision.rows import PAPER_ROWS, check_trials, given_settings
    from ..vision.table import check_rows, run_table

    names = options.methods or list(_SMOKE_ROWS if options.smoke else PAPER_ROWS)
    check_rows(names)
    check_trials(options.trials)
    trials = min(options.trials, 1) if options.smoke else options.trials
    search = None if trials == 0 else (trials, options.search_seed)
    given = given_settings(values, names, search=search is not None)
    shown = []
    for protocol in _protocols(values):
        task = _task(options, values, protocol)
        with _bar((len(names) + 2) * len(seeds) + (trials * len(names) + 2 if search else 0)) as bar:
            document = run_table(task, names, seeds, options.out, bar, search=search, settings=given)
        shown.append((document, "methods", f"table_{protocol}"))
    return _show(shown, options.out)


def _ablate(options: argparse.Namespace, values: dict[str, Any], seeds: list[int]) -> int:
    from ..vision.ablate import run_ablation, vision_grid

    shown = []
    for protocol in _protocols(values):
        task = _task(options, values, protocol, curves=True)
        for name in (options.grid or "components").split(","):
            fixed = ("rho", "learning_rate", "num_train_epochs", "retain_batch_size")
            grid = vision_grid(name.strip(), protocol, {key: values[key] for key in fixed if key in values})
            with _bar((len(grid.variants) + 2) * len(seeds)) as bar:
                document = run_ablation(task, grid, seeds, options.out, bar)
            shown.append((document, grid.title, f"{grid.name}_{protocol}"))
    return _show(shown, options.out)


def _diagnose(options: argparse.Namespace, values: dict[str, Any], seeds: list[int]) -> int:
    from ..presentation.coupling import print_diagnosis, write_diagnosis
    from ..vision.diagnose import diagnose_vision
    from .progress import stage_bars

    asked = {name: getattr(options, name) for name in ("pairs", "points")}
    asked["rhos"] = None if options.rhos is None else tuple(options.rhos)
    if options.smoke:
        asked |= {"pairs": 2, "points": 0}
    for protocol in _protocols(values):
        task = _task(options, values, protocol)
        with stage_bars() as bars:
            found = diagnose_vision(
                task.bench, asked, seed=seeds[0], steps=lambda done, total: bars("training", done, total)
            )
        print_diagnosis(found.document)
        for path in write_diagnosis(found.document, options.out / protocol):
            print(f"wrote {path}")
    return 0


_ACTIONS = {"run": _run, "table": _table, "ablate": _ablate, "diagnose": _diagnose}


def _protocols(values: dict[str, Any]) -> list[str]:
    """The one that was asked for, or both."""
    return [values["protocol"]] if "protocol" in values else ["classwise", "random"]


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
    parser.add_argument("action", choices=list(ACTIONS), metavar="action", help="run, table, ablate or diagnose")
    parser.add_argument("--config", metavar="FILE", help="YAML file, e.g. configs/vision/cifar10_cpu.yaml")
    parser.add_argument("--out", type=Path, default=Path("rosu-vision"), metavar="DIR", help="folder for everything")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="run, table: rows (run: rosu; table: the paper's)")
    parser.add_argument("--seeds", type=seed_number, nargs="+", metavar="N", help="splits; class-wise: classes (0)")
    parser.add_argument("--trials", type=int, default=8, metavar="N", help="table: per method (8); 0: no search")
    parser.add_argument(
        "--search-seed", type=seed_number, default=9, metavar="N", help="table: split of the search (9)"
    )
    parser.add_argument(
        "--grid", metavar="NAMES", help="ablate: components (default), jacobian, rank, rho, retain_batch"
    )
    parser.add_argument("--pairs", type=int, metavar="N", help="diagnose: mini-batch pairs (16)")
    parser.add_argument("--rhos", type=float, nargs="+", metavar="R", help="diagnose: radii (0.1 0.2 0.4 0.8)")
    parser.add_argument("--points", type=int, metavar="N", help="diagnose: further radii of the curves (8)")
    parser.add_argument("--smoke", action="store_true", help="a toy size that only shows that everything runs")
    return parser
