"""One table of the paper: the same number of trials for every row, selected on validation images, then fresh seeds.

The search runs on one seed (class-wise: one class) that the table does not use, and selects by ΔAcc with the accuracy
on validation images, which nobody trained on, in place of that on test images. Whatever is in the folder already is not
run again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypedDict

from ..errors import ConfigError, DataError, unknown
from ..experiments.ablate.cells import Selector, plan, run_cells, selector, summarise
from ..experiments.ablate.grid import Grid, Variant
from ..experiments.attempt import AttemptObserver
from .metrics import ACCURACIES, check_attack
from .rows import ROWS, default_settings, trials
from .settings import complete_vision
from .task import COLUMNS, VisionTask

SCHEMA = "rosu/vision/1"


class VisionDocument(TypedDict):
    """``vision.json``: rows of one protocol.

    Attributes:
        setup: model, images, epochs, protocol, seeds.
        rows: ``name``, ``label``, ``figures`` (measure → mean, std, count; ``delta`` of the means, as the paper's),
            ``paper`` (its figures, where it has them), ``selected`` settings, ``trials`` and ``errors``; of ablations
            ``curve``, RA and FA by epoch.
    """

    schema: str
    setup: dict[str, Any]
    rows: list[dict[str, Any]]


def paper_figures(kind: str, dataset: str | None, protocol: str) -> dict[str, Any]:
    """Rows of the paper by name; empty where it has no such table."""
    content = json.loads((files("rosu_llm.vision") / "paper.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = content[kind].get(dataset or "", {}).get(protocol, {})
    return found


#: The paper's data sets: how their names look in a path, and how many classes they have.
_KNOWN = {
    "cifar10": (r"cifar[-_]?10(?![\d.])", 10),
    "cifar100": (r"cifar[-_]?100(?![\d.])", 100),
    "tiny-imagenet": (r"tiny[-_]?imagenet", 200),
}
_CIFAR10 = {"airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"}


def dataset_name(data: str, classes: Sequence[str]) -> str | None:
    """Which of the paper's data sets this is, by its name (with as many classes) or its classes' names."""
    for name, (pattern, count) in _KNOWN.items():
        if len(classes) == count and re.search(pattern, data.lower()):
            return name
    return "cifar10" if {name.lower() for name in classes} == _CIFAR10 else None


def check_rows(names: Sequence[str]) -> None:
    """Raise for a row that does not exist, or is there twice."""
    for name in names:
        if name not in ROWS:
            raise unknown("method", name, ROWS)
    if len(set(names)) < len(names):
        raise ConfigError(f"--methods {' '.join(names)}: every method once.")


def run_table(
    task: VisionTask,
    names: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    observer: AttemptObserver,
    *,
    search: tuple[int, int] | None = None,
    settings: Mapping[str, Any] | None = None,
    retry_failed: bool = False,
) -> VisionDocument:
    """Rows of one protocol.

    Args:
        search: number of trials and the seed they run on; None takes each row's middle settings.
        settings: given ones, which no row changes; a tuple holds values to try.
        retry_failed: run cells again that failed.
    """
    check_table(task, names, seeds, search, settings or {})
    protocol, own = task.bench.arguments.protocol, dict(settings or {})
    chosen = {name: default_settings(name, protocol, own) for name in names}
    tried: dict[str, dict[str, Any]] = {}
    if search is not None:
        tried = _search(task, names, *search, own, out, observer, retry_failed)
        chosen = {name: found["selected"] for name, found in tried.items()}
    grid = Grid("table", "Methods", tuple(Variant(ROWS[name].label, chosen[name]) for name in names))
    cells, rows = plan(task, [grid], seeds, complete_vision)
    select = selector(rows, run_cells(cells, task, out, observer, retry_failed=retry_failed))
    paper = paper_figures("tables", _dataset(task), protocol)
    made = [row_of(select, "", label, name, paper) for name, label in (("before", "before"), ("retrain", "Retrain"))]
    for name in names:
        row = row_of(select, grid.name, ROWS[name].label, name, paper)
        made.append({**row, "selected": chosen[name], "trials": tried.get(name, {}).get("trials", [])})
    return vision_document(task, made, seeds)


def check_table(
    task: VisionTask,
    names: Sequence[str],
    seeds: Sequence[int],
    search: tuple[int, int] | None,
    settings: Mapping[str, Any],
) -> None:
    """Raise for a table that cannot be made, before any of it is; arguments as in :func:`run_table`."""
    check_rows(names)
    check_attack()
    protocol = task.bench.arguments.protocol
    rows = [default_settings(name, protocol, settings) for name in names]
    if search is None:
        task.check(rows, seeds)
        return
    count, seed = search
    check_search_seed(task, seeds, seed)
    rows += [own for name in names for own in trials(name, protocol, count, settings)]
    task.check(rows, [*seeds, seed])


def check_search_seed(task: VisionTask, seeds: Sequence[int], seed: int) -> None:
    """Raise where settings would be chosen on what the table then reports, or on no images."""
    if seed in seeds:
        raise ConfigError(f"--search-seed {seed} is among --seeds: settings must be chosen on another one.")
    split, forgotten = task.bench.split(seed), {task.bench.split(own).forgotten_class for own in seeds}
    if split.forgotten_class is not None and split.forgotten_class in forgotten:
        raise ConfigError(
            f"forget_class={split.forgotten_class} would be forgotten in the search and in the table: leave it out and "
            f"give --seeds {split.forgotten_class} (class-wise, seeds are classes), or --trials 0 for no search."
        )
    if len(split.validation) == 0:
        share = task.bench.arguments.validation_share
        raise ConfigError(f"validation_share={share} leaves no images to choose settings by: give e.g. 0.05.")


def _dataset(task: VisionTask) -> str | None:
    return dataset_name(str(task.bench.arguments.data), task.bench.train.classes)


def vision_document(task: VisionTask, rows: list[dict[str, Any]], seeds: Sequence[int]) -> VisionDocument:
    """With ΔAcc of the means, as the paper has it."""
    gold = next(row for row in rows if row["name"] == "retrain")["figures"]
    for row in rows:
        own = row["figures"]
        if all(name in own and name in gold for name in ACCURACIES):
            per_seed = own.pop("delta", {})
            total = sum(abs(own[name]["mean"] - gold[name]["mean"]) for name in ACCURACIES)
            own["delta"] = {"mean": total, "std": None, "count": per_seed.get("count")}
    arguments = task.bench.arguments
    names = (
        "data",
        "model",
        "width",
        "protocol",
        "augment",
        "pretrain_epochs",
        "validation_share",
        "forget_share",
        "forget_class",
    )
    setup = {name: getattr(arguments, name) for name in names}
    images = [len(task.bench.train), len(task.bench.test), len(task.bench.train.classes)]
    return {"schema": SCHEMA, "setup": {**setup, "images": images, "seeds": list(seeds)}, "rows": rows}


def row_of(select: Selector, grid: str, label: str, name: str, paper: Mapping[str, Any]) -> dict[str, Any]:
    """Mean and spread of a row over its seeds, and the paper's figures."""
    records = select(grid, label)
    figures = {}
    for measure in COLUMNS:
        found = summarise(records, measure)
        if found is not None:
            figures[measure] = {"mean": found.mean, "std": found.spread, "count": found.count}
    errors = [f"seed {seed}: {record.error}" for seed, record in records.items() if record.error]
    return {"name": name, "label": label, "figures": figures, "paper": paper.get(name), "errors": errors}


def _search(
    task: VisionTask,
    names: Sequence[str],
    count: int,
    seed: int,
    given: Mapping[str, Any],
    out: Path,
    observer: AttemptObserver,
    retry_failed: bool,
) -> dict[str, dict[str, Any]]:
    """Row → its trials, and the settings of the one with the smallest ΔAcc on validation images."""
    protocol = task.bench.arguments.protocol
    settings = {name: trials(name, protocol, count, given) for name in names}
    variants = {
        name: [Variant(f"{ROWS[name].label}, trial {i}", each) for i, each in enumerate(own, 1)]
        for name, own in settings.items()
    }
    grid = Grid("search", "Search", tuple(variant for own in variants.values() for variant in own))
    cells, rows = plan(task, [grid], [seed], complete_vision)
    select = selector(rows, run_cells(cells, task, out, observer, retry_failed=retry_failed))
    result = {}
    for name, own in variants.items():
        tried: list[dict[str, Any]] = []
        for variant in own:
            (record,) = select("search", variant.label).values()
            score = None if record.error else record.metrics["validation_delta"]
            tried.append({"settings": dict(variant.settings), "validation_delta": score, "error": record.error})
        done = [trial for trial in tried if trial["validation_delta"] is not None]
        if not done:
            raise DataError(
                f"No trial of {ROWS[name].label} worked; the last one: {tried[-1]['error']} Mend the cause and pass "
                "--retry-failed."
            )
        best = min(done, key=lambda trial: trial["validation_delta"])
        result[name] = {"selected": best["settings"], "trials": tried}
    return result
