"""The whole report from runs: which sections there are, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...evaluation.tofu.results import Result
from ..audits import orthogonality_section, safeguards_section, sensitivity_section
from ..blocks import Block, Figure, Missing, Report, Section, Table, Text, shown, text_table
from ..coupling import coupling_section
from ..curves import COSINE, FORGET_LOSS, RETAIN_LOSS, Quantity, curves_figure, read_curve
from ..demo import answers as demo_answers
from ..extract import extract_section
from ..muse import muse_section
from ..qualitative import Answer, Choice, choose, read_answers
from ..quantize import quantize_section
from ..relearn import relearn_section
from ..sequence import sequence_section
from ..sweep import sweep_section
from .configuration import configuration, environment
from .metrics import metrics, tofu_tasks
from .reading import (
    DIAGNOSIS,
    EXTRACT,
    MUSE,
    ORTHOGONALITY,
    QUANTIZE,
    RELEARN,
    REPORTS,
    REQUESTS,
    SAFEGUARDS,
    SENSITIVITY,
    SWEEP,
    ReportedRun,
)
from .weights import weights

UNKNOWN = "not recorded"
QUANTITIES = (
    FORGET_LOSS,
    RETAIN_LOSS,
    Quantity("loss", "Outer objective", "loss"),
    COSINE,
    Quantity("coupling/leak", "Leak: first-order change of the retain loss by δ", "|⟨r, δ⟩|", magnitude=True),
    Quantity("step/amplification_ratio", "Amplification: length of the pull over the optimizer's step", "ratio"),
    Quantity("learning_rate", "Learning rate", "η"),
)

#: Schema of a file that another verb left in a run's folder → what shows it, here as in that verb.
_BUILDERS: dict[str, Callable[[Any], Section]] = {
    DIAGNOSIS: partial(coupling_section, brief=True),
    ORTHOGONALITY: partial(orthogonality_section, brief=True),
    SAFEGUARDS: safeguards_section,
    SENSITIVITY: sensitivity_section,
    RELEARN: relearn_section,
    QUANTIZE: quantize_section,
    EXTRACT: extract_section,
    REQUESTS: sequence_section,
    MUSE: muse_section,
    SWEEP: sweep_section,
}
#: Schema → how to get such a file.
_HINTS = {
    DIAGNOSIS: "No diagnosis.json: rosu diagnose --out RUN measures the coupling without changing a weight.",
    ORTHOGONALITY: "No audit_orthogonality.json: rosu audit orthogonality measures it.",
    SAFEGUARDS: "No audit_safeguards.json: rosu audit safeguards RUN reads it off a run's log.",
    SENSITIVITY: "No audit_sensitivity.json: rosu audit sensitivity draws it from a sweep.",
    RELEARN: "No audit_relearn.json: rosu audit relearn RUN --out DIR attacks the model; give DIR beside RUN.",
    QUANTIZE: "No audit_quantize.json: rosu audit quantize RUN --out DIR rounds a copy; give DIR beside RUN.",
    EXTRACT: "No audit_extract.json: rosu audit extract RUN --out DIR asks in many ways; give DIR beside RUN.",
    REQUESTS: "No requests.json: rosu train --requests FILE forgets a list of sets one after another.",
    MUSE: "No MUSE results: rosu eval muse RUN measures verbatim and knowledge memorisation on News or Books.",
    SWEEP: "No sweep: rosu sweep searches settings and leaves trials.json.",
}
#: Kinds of folders that are no run themselves.
_WITHOUT_LOG = ("rosu sweep", "rosu audit", "rosu train --requests")
_SECTIONS = {
    "diagnosis": ("Coupling diagnosis", (DIAGNOSIS,)),
    "audits": ("Audits", (ORTHOGONALITY, SAFEGUARDS, SENSITIVITY)),
    "muse": ("MUSE", (MUSE,)),
    "gone": ("Is it really gone?", (RELEARN, QUANTIZE, EXTRACT)),
    "sequence": ("Sequence of requests", (REQUESTS,)),
    "sweep": ("Sweep", (SWEEP,)),
}


def build(
    runs: Sequence[ReportedRun],
    *,
    target: Result | None = None,
    retain: Result | None = None,
    before: Result | None = None,
    base: Path | None = None,
    answers: int = 8,
    title: str | None = None,
) -> Report:
    """Every section; those without data say what would fill them.

    Args:
        target: results of the initial model; retain: of the model that never saw the forget set.
        before: results with the answers before unlearning, where those are not ``target``'s.
        base: folder of the model that all runs started from, where that is not recorded.
        answers: questions to show.
    """
    measured, main = metrics(runs, target=target, retain=retain)
    title = title or f"Unlearning report: {', '.join(dict.fromkeys(run.folder.name for run in runs))}"
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    sections = (
        _summary(runs),
        measured,
        _answers(runs, before or target, answers),
        curves(runs),
        weights(runs, base),
        *(
            Section(key, name, [block for schema in schemas for block in _of_verb(runs, schema, key)])
            for key, (name, schemas) in _SECTIONS.items()
        ),
        configuration(runs),
        environment(runs),
    )
    many = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    return Report(title, f"{many}; made {made}", sections, main)


def task_of(run: ReportedRun) -> str:
    """What the run is about, in words; two runs with different words are not comparable."""
    if run.tofu is not None:
        return next(f"TOFU {task}" for task, group in tofu_tasks([run]).items() if group)
    if run.demo is not None:
        return "fictitious people (rosu demo)"
    if run.wmdp is not None:
        return "WMDP"
    told = run.settings.get("forget_data") or run.settings.get("forget_split")
    return f"forget {told}" if told else UNKNOWN


def _summary(runs: Sequence[ReportedRun]) -> Section:
    rows = []
    for run in runs:
        ends = [c.values[-1] if (c := read_curve(run.log, key)) else None for key in ("loss/forget", "loss/retain")]
        steps = run.facts.get("steps") or max((int(e["step"]) for e in run.log if "step" in e), default=None)
        start = "its own" if run.demo else Path(run.base).name if run.base else UNKNOWN
        what = (run.label, run.kind, run.method or UNKNOWN, task_of(run), start)
        rows.append((*what, shown(steps), *map(shown, ends)))
    columns = ("run", "made by", "method", "task", "started from", "steps", "last forget loss", "last retain loss")
    blocks: list[Block] = [text_table("What was done", columns, rows)]
    tasks = list(dict.fromkeys(task for run in runs if (task := task_of(run)) != UNKNOWN))
    if len(tasks) > 1:
        several = f"These runs are of different tasks, so their figures do not compare: {'; '.join(tasks)}."
        blocks.insert(0, Missing(several))
    for setting, said in (("calibrate", "Calibrated"), ("forget_until", "Forgotten to a given depth")):
        found = [run.label for run in runs if str(run.settings.get(setting, "off")) not in ("off", "None")]
        if found:
            blocks.append(Text(f"{said}, which is not part of the paper's protocol: {', '.join(found)}."))
    blocks += [Missing(f"{run.label}: {problem}") for run in runs for problem in run.problems]
    return Section("summary", "Summary", blocks)


def _answers(runs: Sequence[ReportedRun], start: Result | None, count: int) -> Section:
    blocks: list[Block] = []
    before = _read(start, "the model before unlearning", blocks) if start else None
    if start is None and tofu_tasks(runs):
        blocks.append(Missing("Answers before unlearning are not known: give --before or --target."))
    for task, group in tofu_tasks(runs).items():
        after = {run.label: read for run in group if run.tofu and (read := _read(run.tofu, run.label, blocks))}
        if not after:
            continue
        choice = choose(before, after, count)
        if before and not choice.examples:
            blocks.append(Missing(f"TOFU {task}: no question is the same as before unlearning; shown without."))
            choice = choose(None, after, count)
        blocks += [Text(f"TOFU {task}."), choice]
    for demo in {id(run.demo): run.demo for run in runs if run.demo}.values():
        if "answers" not in demo:
            blocks.append(Missing("The demo's results.json has no answers, as older versions wrote it: run rosu demo."))
            continue
        examples = demo_answers(demo["answers"])[:count]
        blocks.append(Choice(examples, f"The first {len(examples)} forget questions of the demo."))
    if not any(isinstance(block, Choice) for block in blocks):
        blocks.append(Missing("No run has generated answers (rosu eval tofu RUN writes them)."))
    return Section("answers", "Answers", blocks)


def _read(result: Result, who: str, blocks: list[Block]) -> Mapping[str, Answer] | None:
    try:
        return read_answers(result.path)
    except DataError as error:
        blocks.append(Missing(f"No answers of {who}. {error}"))
        return None


def curves(runs: Sequence[ReportedRun]) -> Section:
    """One figure per quantity that anybody logged."""
    trained = [run for run in runs if run.kind not in _WITHOUT_LOG]
    blocks: list[Block] = [Missing(f"{run.label} has no log, so no curves.") for run in trained if not run.log]
    absent = []
    for quantity in QUANTITIES:
        read = [read_curve(run.log, quantity.key, run.label, at) for at, run in enumerate(runs)]
        found = [curve for curve in read if curve is not None]
        drawn = [curve for curve in found if curve.finite]
        lost = [f"{curve.label} ({curve.lost})" for curve in found if curve.lost]
        if lost:
            blocks.append(Missing(f"{quantity.key} was NaN or infinite in log entries of {', '.join(lost)}: gaps."))
        if drawn:
            blocks.append(curves_figure(f"curve_{quantity.key.replace('/', '_')}", quantity.title, {quantity: drawn}))
        elif not found:
            absent.append(quantity.key)
    if absent and any(run.log for run in runs):
        blocks.append(Missing(f"Logged by no run: {', '.join(absent)} (methods without a perturbation have no leak)."))
    noisy = Text("Losses are those of each step's own window, so they are noisy.")
    return Section("curves", "Curves", [noisy, *blocks] if blocks else [Missing("No run has a log.")])


def _of_verb(runs: Sequence[ReportedRun], schema: str, key: str) -> Iterator[Block]:
    """What the runs have of this schema; without any, the verb that makes it is named."""
    seen: list[Mapping[str, Any]] = []
    for at, run in enumerate(runs):
        content = run.reports.get(schema)
        if content is None or content in seen:  # trials of one sweep share its file
            continue
        seen.append(content)
        try:
            yield from [_of_run(block, run.label, f"{key}_{at}") for block in _BUILDERS[schema](content).blocks]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            yield Missing(f"{REPORTS[schema]} of {run.label} is not as it should be ({error!r}); it is left out.")
    if not seen:
        yield Missing(_HINTS[schema])


def _of_run(block: Block, label: str, key: str) -> Block:
    """The block with the run's label in what is read first; figures get keys that are unique on the page."""
    if isinstance(block, Figure):
        return replace(block, key=f"{key}_{block.key}", title=f"{block.title}: {label}")
    if isinstance(block, Table):
        return replace(block, caption=f"{block.caption}: {label}")
    return replace(block, text=f"{label}: {block.text}") if isinstance(block, Text) else block
