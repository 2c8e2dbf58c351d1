"""What the models know before and after: one table per task, beside the paper's rows, and the frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...evaluation.results import Result
from ...evaluation.wmdp.delta_score import CHANCE
from ...experiments.demo.contenders import LABELS
from ...files import read_json
from ..demo import COLUMNS as DEMO_COLUMNS
from ..demo import NOTE as DEMO_NOTE
from ..tables import Table, number
from ..tofu import Summarised, TofuTable, tofu_table
from ..wmdp import DIGITS, join
from .blocks import MISSING, Block, Grid, Missing, Section, shown
from .frontier import Point, frontier
from .paper import PAPER_LABEL, PAPER_NOTE, TOFU
from .run import Run


def metrics(runs: Sequence[Run], *, target: Result | None, retain: Result | None) -> tuple[Section, dict[Path, Grid]]:
    """The section, and the table for a run's model card by the run's folder."""
    blocks: list[Block] = []
    main: dict[Path, Grid] = {}
    for at, (task, group) in enumerate(tofu_tasks(runs).items()):
        made, problem = _summarise(group, target, retain)
        if problem:
            blocks.append(Missing(problem))
        table = _grid(made.table, f"TOFU {task}")
        main |= {run.folder: table for run in group}
        blocks += [_with_paper(table), *_tofu_frontier(runs, made, task, at, target is not None)]
        blocks.append(_details(group, made.references))
    for demo in {id(run.demo): run.demo for run in runs if run.demo is not None}.values():
        places = {_own_label(run): at for at, run in enumerate(runs) if run.demo is demo}
        blocks += [_demo_table(demo.rows), _demo_frontier(demo.rows, places)]
    if any(run.wmdp is not None for run in runs):
        blocks += _wmdp(runs, main)
    unknown = [run.label for run in runs if run.kind != "rosu sweep" and not (run.tofu or run.demo or run.wmdp)]
    if unknown:
        blocks.append(
            Missing(
                f"No evaluation of {', '.join(unknown)} was found. For TOFU: rosu eval tofu RUN; for WMDP: "
                "rosu eval wmdp RUN --out RUN/evals; then make the report again."
            )
        )
    return Section("metrics", "Metrics", blocks or [Missing("No run was evaluated.")]), main


def tofu_tasks(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs with a TOFU evaluation by what they can be compared on."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.tofu is not None:
            asked = f", {run.tofu.questions} questions" if run.tofu.questions else ""
            model = run.tofu.model or run.tofu.architecture or "model not recorded"
            name = f"{run.tofu.split or 'of unknown split'}, {model}{asked}"
            groups.setdefault(name, []).append(run)
    return {name: part for together in groups.items() for name, part in _by_size(*together).items()}


def _by_size(name: str, runs: list[Run]) -> dict[str, list[Run]]:
    """Apart where models of one name, or none, are known to be of several kinds or sizes."""
    sizes = [run.tofu.architecture if run.tofu else None for run in runs]
    if len({size for size in sizes if size}) < 2:
        return {name: runs}
    parts: dict[str, list[Run]] = {}
    for run, size in zip(runs, sizes, strict=True):
        parts.setdefault(f"{name}, {size or 'size not recorded'}", []).append(run)
    return parts


def _summarise(group: Sequence[Run], target: Result | None, retain: Result | None) -> tuple[TofuTable, str | None]:
    """The paper's scores; without the reference models when those were evaluated on something else."""
    results = [run.tofu for run in group if run.tofu is not None]
    try:
        return _relabelled(tofu_table(results, retain=retain, target=target), group), None
    except DataError as error:
        return _relabelled(tofu_table(results), group), f"The reference models are left out here. {error}"


def _relabelled(made: TofuTable, group: Sequence[Run]) -> TofuTable:
    """With the report's labels for the runs in place of the table's own."""
    runs = tuple(replace(run, label=named.label) for run, named in zip(made.runs, group, strict=True))
    rows = list(made.table.rows)
    for at, run in enumerate(runs, len(made.references)):
        rows[at] = replace(rows[at], label=run.label)
    return replace(made, runs=runs, table=replace(made.table, rows=tuple(rows)))


def _grid(table: Table, caption: str, digits: int = 2) -> Grid:
    """A table of figures as text."""
    rows = []
    for row in table.rows:
        cells = [row.label]
        for cell in row.cells:
            text = (cell.text or MISSING) if cell.value is None else number(cell.value, digits)
            text += "" if cell.spread is None else f" ± {number(cell.spread, digits)}"
            cells.append(text if cell.footnote is None else f"{text} [{cell.footnote}]")
        rows.append(tuple(cells))
    notes = (*table.notes, *(f"[{at}] {note}" for at, note in enumerate(table.footnotes, 1)))
    return Grid(caption, ("model", *table.columns), tuple(rows), notes=notes)


def _with_paper(grid: Grid) -> Grid:
    """With the paper's rows below; its scores all count fluency, so a heading that says otherwise is not theirs."""
    rows = tuple((name, *(MISSING if f is None else number(f, 2) for f in figures)) for name, figures in TOFU.items())
    other = any("MU only" in column for column in grid.columns)
    notes = (*grid.notes, PAPER_NOTE, *(["The paper's scores count fluency: 'MU only' is not about them."] * other))
    return Grid(
        grid.caption,
        grid.columns,
        grid.rows + rows,
        groups={0: "this report", len(grid.rows): PAPER_LABEL},
        notes=notes,
    )


def _tofu_frontier(runs: Sequence[Run], made: TofuTable, task: str, at: int, relative: bool) -> list[Block]:
    order = {run.label: place for place, run in enumerate(runs)}

    def point(model: Summarised, **more: Any) -> Point | None:
        mem, util = model.summary.mem, model.summary.util
        return None if mem is None or util is None else Point(model.label, mem, util, **more)

    points = [point(model, reference=True) for model in made.references]
    ours = [point(model, place=order[model.label]) for model in made.runs]
    if not any(ours):
        return [Missing(f"No frontier for TOFU {task}: it needs Mem and Util, which the table above lacks.")]
    paper = []
    if relative:  # the paper's Util is relative to the initial model: next to a raw one it would mislead
        paper = [Point(name, f[2], f[4], paper=True) for name, f in TOFU.items()]
    found = [p for p in (*points, *ours, *paper) if p is not None]
    titles = ("Mem: forget set no longer known", "Util: ability kept")
    return [frontier(f"frontier_{at}", f"Frontier: TOFU {task}", found, titles, PAPER_LABEL)]


def _details(group: Sequence[Run], references: Sequence[Summarised]) -> Grid:
    """Every figure of the evaluation, with the difference to the initial model's."""
    models = [(model.label, _figures(model.result)) for model in references]
    models += [(run.label, _figures(run.tofu)) for run in group if run.tofu is not None]
    before = dict(models).get("Initial", {})
    names = sorted({name for _, figures in models for name in figures})
    rows = []
    for name in names:
        cells = []
        for label, figures in models:
            value, start = figures.get(name), before.get(name)
            change = (
                f" ({value - start:+.3f})" if value is not None and start is not None and label != "Initial" else ""
            )
            cells.append(shown(value) + change)
        rows.append((name, *cells))
    note = "In brackets the change from the initial model." if before else "Give --target to see the change."
    columns = ("metric", *(label for label, _ in models))
    return Grid("All figures of the evaluation", columns, tuple(rows), notes=(note,), folded=True)


def _figures(result: Result) -> dict[str, float]:
    """Metric → value, whatever the file has."""
    found = {}
    for name, entry in read_json(result.path).items():
        value = entry.get("agg_value") if isinstance(entry, Mapping) else entry
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = float(value)
    return found


def _demo_table(rows: Sequence[Mapping[str, Any]]) -> Grid:
    table = tuple(
        (LABELS.get(str(row["method"]), str(row["method"])), *(_three(row.get(key)) for key in DEMO_COLUMNS))
        for row in rows
    )
    return Grid("rosu demo", ("model", *DEMO_COLUMNS.values()), table, notes=(DEMO_NOTE,))


def _three(value: Any) -> str:
    return number(value, 3) if isinstance(value, int | float) else MISSING


def _own_label(run: Run) -> str:
    """The method's name as the demo has it, without the folder that tells several demos apart."""
    return run.label.removeprefix(f"{run.folder.name}: ")


def _demo_frontier(rows: Sequence[Mapping[str, Any]], places: Mapping[str, int]) -> Block:
    points = []
    for row in rows:
        label = LABELS.get(str(row["method"]), str(row["method"]))
        x, y = row.get("forget_em"), row.get("retain_em")
        if isinstance(x, int | float) and isinstance(y, int | float):
            points.append(Point(label, x, y, place=places.get(label), reference=label not in places))
    if not points:
        return Missing("No frontier of the demo: its rows lack forget_em and retain_em.")
    titles = ("forget set: answer tokens reproduced (goal: the gold model's)", "retain set: answer tokens reproduced")
    return frontier("frontier_demo", "Frontier: rosu demo", points, titles)


def _wmdp(runs: Sequence[Run], main: dict[Path, Grid]) -> list[Block]:
    try:
        table = join([run.wmdp for run in runs if run.wmdp is not None])
    except DataError as error:
        return [Missing(f"WMDP results are left out. {error}")]
    grid = _grid(table, "WMDP and MMLU", DIGITS)
    main |= {run.folder: grid for run in runs if run.wmdp is not None}
    places = {str(run.wmdp): at for at, run in enumerate(runs) if run.wmdp is not None}
    points = []
    for row in table.rows:
        _, mmlu, bio, cyber = (cell.value for cell in row.cells[:4])
        if mmlu is not None and bio is not None and cyber is not None:
            place, paper = places.get(str(row.details.get("file"))), row.details["source"] == "paper"
            points.append(Point(row.label, (bio + cyber) / 2, mmlu, place, place is None and not paper, paper))
    titles = (f"mean accuracy on WMDP-Bio and WMDP-Cyber (chance {CHANCE})", "accuracy on MMLU")
    return [grid, *([frontier("frontier_wmdp", "Frontier: WMDP", points, titles)] if points else [])]
