"""A table and a frontier of runs among published models (``rosu table --published``, ``rosu report``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ..evaluation.tofu.published import (
    MODEL,
    SPLIT,
    TRANSFORM,
    PublishedModel,
    best_published,
    published_models,
)
from ..evaluation.tofu.summary import COLUMNS, TofuSummary, auc_transform
from .blocks import Figure, Row, Table, TableCell, printed
from .charts import Point, frontier
from .tofu import TofuTable

LABEL = f"published models, {MODEL}, {SPLIT}"
PAPER = "the paper's table"
TITLES = ("Mem: forget set no longer known", "Util: ability kept")


def among_published(table: Table, *, paper: bool = True) -> Table:
    """The table with the best published model of each method and the paper's rows below, and how far they compare."""
    models = published_models()
    theirs = [_row(f"{model.method} (theirs)", model) for model in models if model.reference]
    counts = Counter(model.method for model in models)
    best = best_published(models)
    chosen = sorted(best.items(), key=lambda item: -(item[1].summary.agg_mu or 0.0))
    theirs += [_row(method, model) for method, model in chosen]
    rows = [Row(name, tuple(map(TableCell, figures))) for name, figures in printed("tofu").items()] if paper else []
    groups = {0: "these runs"} if table.rows else {}
    start = len(table.rows)
    groups |= {start: f"{LABEL}: best of each method by Agg_MU"} | ({start + len(theirs): PAPER} if paper else {})
    notes = (*table.notes, _source(counts), _difference(models, printed("tofu")["Retain"][2]))
    return replace(table, rows=(*table.rows, *theirs, *rows), groups=groups, notes=notes)


def published_table() -> Table:
    """The published models by themselves."""
    return among_published(Table(COLUMNS, ()))


def _row(label: str, model: PublishedModel) -> Row:
    cells = tuple(TableCell(value) for value in model.summary.columns().values())
    return Row(label, cells, model.reference, {"published": model.name, "inputs": dict(model.figures)})


def _source(counts: Counter[str]) -> str:
    trained = {method: count for method, count in counts.items() if method not in ("Initial", "Retain")}
    return (
        f"Published: {sum(trained.values())} public OpenUnlearning models measured by a third party "
        "(github.com/gnueaj/unlearning-depth-score, commit fc31639, Apache-2.0), "
        + ", ".join(f"{method} {count}" for method, count in sorted(trained.items()))
        + f"; scores formed here from their components. Their AUC transform is '{TRANSFORM}', "
        f"{auc_transform(TRANSFORM).formula}; Util relative to their initial model."
    )


def _difference(models: Sequence[PublishedModel], paper: float) -> str:
    theirs = next(model.summary.mem for model in models if model.method == "Retain")
    return (
        f"The paper's rows do not compare with the published ones: its retain model has Mem {paper:.2f}, theirs "
        f"{theirs:.2f}, so the two were evaluated differently."
    )


def published_frontier(key: str, title: str, points: Sequence[Point]) -> Figure:
    """Runs (``points``) among all published models; the best of each method is named."""
    models = published_models()
    cloud = [_place(model.summary) for model in models if not model.reference]
    named = [Point(method, *_place(model.summary), published=True) for method, model in best_published(models).items()]
    references = [
        Point(f"{model.method} (theirs)", *_place(model.summary), reference=True) for model in models if model.reference
    ]
    return frontier(key, title, [*references, *points, *named], TITLES, cloud=cloud)


def _place(summary: TofuSummary) -> tuple[float, float]:
    assert summary.mem is not None
    assert summary.util is not None
    return summary.mem, summary.util


def run_points(made: TofuTable) -> list[Point]:
    """The runs of a table and its references, those that have Mem and Util."""
    found = []
    for at, model in enumerate((*made.references, *made.runs)):
        mem, util = model.summary.mem, model.summary.util
        if mem is not None and util is not None:
            reference = at < len(made.references)
            found.append(Point(model.label, mem, util, None if reference else at, reference))
    return found
