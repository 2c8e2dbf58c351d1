"""What the models know before and after: one table per task, beside the paper's rows, and the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...evaluation.tofu.published import TRANSFORM, fits
from ...evaluation.tofu.results import Result
from ...evaluation.wmdp.document import CHANCE
from ..blocks import Block, Missing, Row, Section, Table, TableCell, printed, shown, text_table
from ..charts import Point, frontier
from ..demo import demo_landing, demo_table
from ..published import among_published, published_frontier, run_points
from ..tofu import Summarised, TofuTable, all_figures, tofu_table
from ..wmdp import join
from .reading import ReportedRun

PAPER_LABEL = "paper, Llama-3.2-1B, forget10"
PAPER_NOTE = (
    f"Rows under '{PAPER_LABEL}' are the paper's printed figures, not runs; Util there is relative to the initial "
    "model. The paper names no split: forget10 is its pipeline's default. Its main table has no Agg_MU; ROSU's is "
    "from its table over ρ."
)

#: (Agg, Agg_MU, Mem, Priv, Util)
TOFU = printed("tofu")


def metrics(
    runs: Sequence[ReportedRun], *, target: Result | None, retain: Result | None
) -> tuple[Section, dict[Path, Table]]:
    """The section, and the table for a run's model card by the run's folder."""
    blocks: list[Block] = []
    main: dict[Path, Table] = {}
    for at, (task, group) in enumerate(tofu_tasks(runs).items()):
        results, labels = [run.tofu for run in group if run.tofu is not None], [run.label for run in group]
        try:
            made = tofu_table(results, retain=retain, target=target, labels=labels)
        except DataError as error:  # the reference models were evaluated on something else
            made = tofu_table(results, labels=labels)
            blocks.append(Missing(f"The reference models are left out here. {error}"))
        table = replace(made.table, caption=f"TOFU {task}", heading="model")
        main |= {run.folder: table for run in group}
        relative = target is not None and made.references != ()
        blocks += [_with_paper(table), *_tofu_frontier([runs.index(run) for run in group], made, task, at, relative)]
        blocks.append(_details(group, made.references))
        if relative and all(map(fits, results)):
            blocks += _among_published(results, made, labels, task, at, retain, target)
    for at, demo in enumerate({id(run.demo): run.demo for run in runs if run.demo is not None}.values()):
        # The demo's own labels, without the folder that tells several demos apart.
        places = {run.label.removeprefix(f"{run.folder.name}: "): i for i, run in enumerate(runs) if run.demo is demo}
        blocks.append(replace(demo_table(demo["rows"]), caption="rosu demo", heading="model"))
        figure = demo_landing(demo["rows"], places)
        lacking = Missing("No plot of where the models land: the demo's rows lack forget_em and mia_auc.")
        blocks.append(replace(figure, key=f"landing_demo_{at}" if at else "landing_demo") if figure else lacking)
    if any(run.wmdp is not None for run in runs):
        blocks += _wmdp(runs, main)
    unknown = [
        run.label
        for run in runs
        if run.kind not in ("rosu sweep", "rosu audit", "rosu train --requests")
        and not (run.tofu or run.demo or run.wmdp)
    ]
    if unknown:
        how = "For TOFU: rosu eval tofu RUN; for WMDP: rosu eval wmdp RUN --out RUN/evals; then make the report again."
        blocks.append(Missing(f"No evaluation of {', '.join(unknown)} was found. {how}"))
    return Section("metrics", "Metrics", blocks or [Missing("No run was evaluated.")]), main


def tofu_tasks(runs: Sequence[ReportedRun]) -> dict[str, list[ReportedRun]]:
    """The runs with a TOFU evaluation by what they can be compared on."""
    groups: dict[str, list[tuple[ReportedRun, str | None]]] = {}
    for run in runs:
        if run.tofu is not None:
            asked = f", {run.tofu.questions} questions" if run.tofu.questions else ""
            model = run.tofu.model or run.tofu.architecture or "model not recorded"
            name = f"{run.tofu.split or 'of unknown split'}, {model}{asked}"
            groups.setdefault(name, []).append((run, run.tofu.architecture))
    tasks: dict[str, list[ReportedRun]] = {}
    for name, group in groups.items():
        several = len({size for _, size in group if size}) > 1  # models of one name, or of none, that differ in size
        for run, size in group:
            tasks.setdefault(f"{name}, {size or 'size not recorded'}" if several else name, []).append(run)
    return tasks


def _with_paper(table: Table) -> Table:
    """The table with the paper's rows below, and a note where a heading does not hold for them."""
    rows = tuple(Row(name, tuple(map(TableCell, figures))) for name, figures in TOFU.items())
    other = any("MU only" in column for column in table.columns)
    notes = (*table.notes, PAPER_NOTE, *(["The paper's scores count fluency: 'MU only' is not about them."] * other))
    groups = {0: "this report", len(table.rows): PAPER_LABEL}
    return replace(table, rows=table.rows + rows, groups=groups, notes=notes)


def _tofu_frontier(places: Sequence[int], made: TofuTable, task: str, at: int, relative: bool) -> list[Block]:
    """``places`` are those of the table's runs in the report."""

    def point(model: Summarised, **more: Any) -> Point | None:
        mem, util = model.summary.mem, model.summary.util
        return None if mem is None or util is None else Point(model.label, mem, util, **more)

    points = [point(model, reference=True) for model in made.references]
    ours = [point(model, place=place) for model, place in zip(made.runs, places, strict=True)]
    if not any(ours):
        return [Missing(f"No frontier for TOFU {task}: it needs Mem and Util, which the table above lacks.")]
    paper = []
    if relative:  # the paper's Util is relative to the initial model: next to a raw one it would mislead
        paper = [Point(name, f[2], f[4], paper=True) for name, f in TOFU.items()]
    found = [point for point in (*points, *ours, *paper) if point is not None]
    titles = ("Mem: forget set no longer known", "Util: ability kept")
    return [frontier(f"frontier_{at}", f"Frontier: TOFU {task}", found, titles, PAPER_LABEL)]


def _among_published(
    results: Sequence[Result],
    made: TofuTable,
    labels: Sequence[str],
    task: str,
    at: int,
    retain: Result | None,
    target: Result | None,
) -> list[Block]:
    """The runs among published models of the same task, with their AUC transform."""
    same = tofu_table(results, labels=labels, transform=TRANSFORM, retain=retain, target=target)
    table = among_published(same.table, paper=False)  # its rows stand in the table before
    table = replace(table, caption=f"TOFU {task}, among published models", heading="model", folded=True)
    points = run_points(made)
    figure = published_frontier(f"published_{at}", f"Among published models: TOFU {task}", points)
    return [table, *([figure] if points else [])]


def _details(group: Sequence[ReportedRun], references: Sequence[Summarised]) -> Table:
    """Every figure of the evaluation, with the difference to the initial model's."""
    models = [(model.label, all_figures(model.result.path)) for model in references]
    models += [(run.label, all_figures(run.tofu.path)) for run in group if run.tofu is not None]
    before = dict(models).get("Initial", {})
    rows = []
    for name in sorted({name for _, figures in models for name in figures}):
        cells = []
        for label, figures in models:
            value, start = figures.get(name), None if label == "Initial" else before.get(name)
            cells.append(shown(value) + ("" if value is None or start is None else f" ({value - start:+.3f})"))
        rows.append((name, *cells))
    note = "In brackets the change from the initial model." if before else "Give --target to see the change."
    columns = ("metric", *(label for label, _ in models))
    return text_table("All figures of the evaluation", columns, rows, notes=(note,), folded=True)


def _wmdp(runs: Sequence[ReportedRun], main: dict[Path, Table]) -> list[Block]:
    try:
        joined = join([run.wmdp for run in runs if run.wmdp is not None])
    except DataError as error:
        return [Missing(f"WMDP results are left out. {error}")]
    table = replace(joined, caption="WMDP and MMLU", heading="model")
    main |= {run.folder: table for run in runs if run.wmdp is not None}
    places = {str(run.wmdp): at for at, run in enumerate(runs) if run.wmdp is not None}
    points = []
    for row in table.rows:
        _, mmlu, bio, cyber = (cell.value for cell in row.cells[:4])
        if mmlu is not None and bio is not None and cyber is not None:
            place, paper = places.get(str(row.details.get("file"))), row.details["source"] == "paper"
            points.append(Point(row.label, (bio + cyber) / 2, mmlu, place, place is None and not paper, paper))
    titles = (f"mean accuracy on WMDP-Bio and WMDP-Cyber (chance {CHANCE})", "accuracy on MMLU")
    return [table, *([frontier("frontier_wmdp", "Frontier: WMDP", points, titles)] if points else [])]
