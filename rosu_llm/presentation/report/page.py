"""The whole report from runs: which sections there are, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ...errors import DataError
from ...evaluation.results import Result
from ..qualitative import Answer, Choice, choose, read_answers
from .audits import audits
from .blocks import Answers, Block, Grid, Missing, Report, Section, Text, shown
from .configuration import configuration, environment
from .curves import curve, curves
from .demo_run import demo_answers
from .diagnosis import diagnosis
from .metrics import metrics, tofu_tasks
from .run import Run
from .sweep import sweep
from .weights_section import weights

UNKNOWN = "not recorded"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What goes with the runs.

    Attributes:
        target: results of the initial model; retain: of the model that never saw the forget set.
        before: results with the answers before unlearning, where those are not ``target``'s.
        base: folder of the model that all runs started from, where that is not recorded.
        answers: questions to show.
    """

    target: Result | None = None
    retain: Result | None = None
    before: Result | None = None
    base: Path | None = None
    answers: int = 8
    title: str | None = None


def build(runs: Sequence[Run], options: Options) -> Report:
    """Every section; those without data say what would fill them."""
    measured, main = metrics(runs, target=options.target, retain=options.retain)
    title = options.title or f"Unlearning report: {', '.join(dict.fromkeys(run.folder.name for run in runs))}"
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    sections = (
        _summary(runs),
        measured,
        _answers(runs, options),
        curves(runs),
        weights(runs, options.base),
        diagnosis(runs),
        audits(runs),
        sweep(runs),
        configuration(runs),
        environment(runs),
    )
    many = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    return Report(title, f"{many}; made {made}", sections, main)


def task_of(run: Run) -> str:
    """What the run is about, in words; two runs with different words are not comparable."""
    if run.tofu is not None:
        return next(f"TOFU {task}" for task, group in tofu_tasks([run]).items() if group)
    if run.demo is not None:
        return "fictitious people (rosu demo)"
    if run.wmdp is not None:
        return "WMDP"
    told = run.settings.get("forget_data") or run.settings.get("forget_split")
    return f"forget {told}" if told else UNKNOWN


def _summary(runs: Sequence[Run]) -> Section:
    rows = []
    for run in runs:
        ends = [c.values[-1] if (c := curve(run, key)) else None for key in ("loss/forget", "loss/retain")]
        steps = run.facts.get("steps") or max((int(e["step"]) for e in run.log if "step" in e), default=None)
        start = "its own" if run.demo else Path(run.base).name if run.base else UNKNOWN
        what = (run.label, run.kind, run.method or UNKNOWN, task_of(run), start)
        rows.append((*what, shown(steps), *map(shown, ends)))
    columns = ("run", "made by", "method", "task", "started from", "steps", "last forget loss", "last retain loss")
    blocks: list[Block] = [Grid("What was done", columns, tuple(rows))]
    tasks = list(dict.fromkeys(task for run in runs if (task := task_of(run)) != UNKNOWN))
    if len(tasks) > 1:
        blocks.insert(
            0, Missing(f"These runs are of different tasks, so their figures do not compare: {'; '.join(tasks)}.")
        )
    calibrated = [run.label for run in runs if str(run.settings.get("calibrate", "off")) not in ("off", "None")]
    if calibrated:
        blocks.append(Text(f"Calibrated, which is not part of the paper's protocol: {', '.join(calibrated)}."))
    blocks += [Missing(f"{run.label}: {problem}") for run in runs for problem in run.problems]
    return Section("summary", "Summary", blocks)


def _answers(runs: Sequence[Run], options: Options) -> Section:
    blocks: list[Block] = []
    start = options.before or options.target
    before = _read(start, "the model before unlearning", blocks) if start else None
    if start is None and tofu_tasks(runs):
        blocks.append(Missing("Answers before unlearning are not known: give --before or --target."))
    for task, group in tofu_tasks(runs).items():
        after = {run.label: read for run in group if run.tofu and (read := _read(run.tofu, run.label, blocks))}
        if not after:
            continue
        choice = choose(before, after, options.answers)
        if before and not choice.examples:
            blocks.append(Missing(f"TOFU {task}: no question is the same as before unlearning; shown without."))
            choice = choose(None, after, options.answers)
        blocks += [Text(f"TOFU {task}."), Answers(choice)]
    for demo in {id(run.demo): run.demo for run in runs if run.demo}.values():
        examples = demo_answers(demo)[: options.answers]
        blocks.append(Answers(Choice(examples, f"The first {len(examples)} forget questions of the demo.")))
    if not any(isinstance(block, Answers) for block in blocks):
        blocks.append(Missing("No run has generated answers (rosu eval tofu RUN writes them)."))
    return Section("answers", "Answers", blocks)


def _read(result: Result, who: str, blocks: list[Block]) -> Mapping[str, Answer] | None:
    try:
        return read_answers(result.path)
    except DataError as error:
        blocks.append(Missing(f"No answers of {who}. {error}"))
        return None
