"""The paper's table from result files: a row per run, five scores, and notes on how they were computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..evaluation.tofu.collection import check_comparable, unique_labels
from ..evaluation.tofu.document import FILES
from ..evaluation.tofu.methods import best_by_agg_mu, describe, methods_of
from ..evaluation.tofu.metrics import METRICS
from ..evaluation.tofu.results import Result, read_result
from ..evaluation.tofu.summary import ATTACKS, COLUMNS, FLUENCY, MODEL_UTILITY, TofuSummary, auc_transform, summarise
from ..files import read_json
from .blocks import Footnotes, Row, Table, TableCell
from .writers import render, write_table

ALL_METRICS = "experiment=eval/tofu/rosu, or with +eval/tofu_metrics=[rosu_summary]"


class Summarised(NamedTuple):
    """A run with its scores."""

    label: str
    result: Result
    summary: TofuSummary
    method: str = ""


class TofuTable(NamedTuple):
    """All runs, the reference models, and the table of what is shown of them."""

    runs: tuple[Summarised, ...]
    references: tuple[Summarised, ...]
    table: Table


def tofu_table(
    results: Sequence[Result],
    *,
    retain: Result | None = None,
    target: Result | None = None,
    transform: str = "range",
    best: bool = False,
    details: bool = False,
    labels: Sequence[str] | None = None,
) -> TofuTable:
    """Summarise runs against their references.

    ``best`` keeps the run with the highest Agg_MU of each method, ``details`` adds Util as measured and the closeness
    of each attack, ``labels`` name the runs (by default after their folders). Fluency is left out of Util only when
    nobody has it, so that a column never mixes two definitions; the columns built on it then say so.
    """
    auc_transform(transform)
    references = {name: result for name, result in (("Initial", target), ("Retain", retain)) if result is not None}
    everything = [*results, *references.values()]
    check_comparable(everything)
    with_fluency = any(FLUENCY in result.figures for result in everything)
    given = {"retain": retain.figures if retain else None, "target": target.figures if target else None}

    def summary(result: Result) -> TofuSummary:
        return summarise(result.figures, **given, transform=transform, with_fluency=with_fluency)

    labels = labels or unique_labels(results)
    methods = methods_of(results, labels)
    results = [_same_non_members(result, retain) for result in results]
    runs = tuple(
        Summarised(f"{label} ({r.depth})" if r.depth else label, r, summary(r), method)
        for label, r, method in zip(labels, results, methods, strict=True)
    )
    shown, notes = runs, _notes(everything, transform, target is not None, with_fluency)
    notes += _depth_notes(runs)
    if best:
        scores = [run.summary.agg_mu for run in runs]
        winners = best_by_agg_mu(methods, scores)
        shown = tuple(runs[at]._replace(label=method) for method, at in winners.items())
        notes.append(describe(winners, methods, labels, scores))
    models = tuple(Summarised(name, result, summary(result)) for name, result in references.items())
    footnotes = Footnotes()
    rows = [_row(model, footnotes, details, reference=True) for model in models]
    rows += [_row(run, footnotes, details) for run in shown]
    suffix = "" if with_fluency else " (MU only)"
    columns = tuple(column + ("" if column in ("Mem", "Priv") else suffix) for column in COLUMNS)
    if details:
        columns += (f"Util raw{suffix}", *(f"s_{attack}" for attack in ATTACKS))
    return TofuTable(runs, models, Table(columns, tuple(rows), tuple(notes), tuple(footnotes)))


def _row(run: Summarised, footnotes: Footnotes, more: bool, *, reference: bool = False) -> Row:
    cells = [
        TableCell(value, footnotes.mark(_why(run, column) if value is None else None))
        for column, value in run.summary.columns().items()
    ]
    if more:
        cells += map(TableCell, (run.summary.util_raw, *map(run.summary.closeness.get, ATTACKS)))
    details = {
        "source": str(run.result.path),
        "inputs": dict(run.result.figures),
        "closeness": dict(run.summary.closeness),
        "util_raw": run.summary.util_raw,
    }
    return Row(run.label, tuple(cells), reference, details)


def _why(run: Summarised, column: str) -> str:
    """What a missing figure needs."""
    needs = run.summary.missing[column]
    reasons: dict[str, list[str]] = {}
    for name, why in run.result.unusable.items():
        if name in needs:
            reasons.setdefault(why, []).append(name)
    unusable = [f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {why}" for why, names in reasons.items()]
    others = [name for name in needs if name not in run.result.unusable]
    text = f"{column} needs {', '.join(others)}" if others else f"{column} is unknown"
    if any(name in run.summary.columns() for name in others):
        return text + "."
    flags = {"the results of the retain model": "give --retain", "the results of the initial model": "give --target"}
    how = [flag for need, flag in flags.items() if need in others]
    if any(not name.startswith(("the results", "an initial")) for name in others):
        if run.result.knows_all_metrics:
            how.append("its evaluation did not get that far, so start it again")
        else:
            how.append("evaluate without --metrics" if run.result.sidecar else f"evaluate with {ALL_METRICS}")
    return text + (f": {', '.join(how)}" if how else "") + (f" ({'; '.join(unusable)})" if unusable else "") + "."


def _same_non_members(result: Result, retain: Result | None) -> Result:
    """The run, without its attacks where these had other held-out questions than each other or the retain model's."""
    ours, theirs = (dict(found.non_members) if found else {} for found in (result, retain))
    counts, reference = {*ours.values()}, {*theirs.values()}
    attacks = ours or dict.fromkeys(name for name in ATTACKS.values() if name in result.figures)
    if len(counts) > 1:
        why = f"of attacks on {' and '.join(map(str, sorted(counts)))} non-members: add eval.tofu.overwrite=true"
    elif counts and reference and counts != reference:
        why = (
            f"of attacks on {counts.pop()} non-members, the retain model's on {' and '.join(map(str, reference))}: "
            "evaluate both with the same number of held_out_questions"
        )
    elif retain and not (counts and reference) and result.set_aside != retain.set_aside:
        why = (
            f"of attacks that left {result.set_aside} held-out questions out, the retain model's {retain.set_aside}: "
            "evaluate both with the same number of held_out_questions"
        )
    else:
        return result
    figures = {name: value for name, value in result.figures.items() if name not in attacks}
    return replace(result, figures=figures, unusable={**result.unusable, **dict.fromkeys(attacks, why)})


def _depth_notes(runs: Sequence[Summarised]) -> list[str]:
    """A depth is not the paper's protocol; and the questions that told it must not be the attacks' non-members."""
    if not any(run.result.depth for run in runs):
        return []
    notes = ["Calibrated and bounded runs know when to stop from what the paper's protocol does not have."]
    if again := [run.label for run in runs if run.result.reuses_non_members]:
        notes.append(
            f"Priv counts questions as unseen that the training looked at, in: {', '.join(again)}. Evaluate with "
            "experiment=eval/tofu/rosu_recommended, or rosu eval tofu --held-out-questions."
        )
    return notes


def _notes(results: Sequence[Result], transform: str, relative: bool, with_fluency: bool) -> list[str]:
    split = next((result.split for result in results if result.split), "of unknown split")
    models = [result.model for result in results] + [result.architecture for result in results]
    model = next((model for model in models if model), "unknown model")
    notes = [f"TOFU {split}, {model}; higher is better."]
    alike = all(result.architecture for result in results)  # then they were compared by that
    unsure = [str(x.path) for x in results if x.split is None or (x.model is None and not alike)]
    if unsure:
        notes.append(f"Split or model is not recorded, so not checked, in: {', '.join(unsure)}.")
    notes.append(
        f"Priv: AUC transform '{transform}', {auc_transform(transform).formula}, with a the attack's AUC on the model "
        "and r on the retain model (the benchmark's own transform is unpublished)."
    )
    parts = f"HM({MODEL_UTILITY}, fluency)" if with_fluency else f"{MODEL_UTILITY} alone, as nobody measured {FLUENCY}"
    scale = "relative to the initial model" if relative else "raw, not relative to the initial model (give --target)"
    notes.append(f"Util: {parts}, {scale}; so it enters Agg and Agg_MU.")
    limits = {limit for result in results if (limit := result.sidecar.get("conditions", {}).get("limit"))}
    if limits:
        notes.append(f"LIMITED to the first {max(limits)} rows of each data set: a trial, not a benchmark result.")
    if any(result.derived_truth_ratio for result in results):
        notes.append("The truth ratio in Mem was formed from the losses per question in the files.")
    return notes


def all_figures(path: Path) -> dict[str, float]:
    """Metric → value, whatever the file has."""
    entries = {name: e.get("agg_value") if isinstance(e, Mapping) else e for name, e in read_json(path).items()}
    return {n: v for n, v in entries.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def write_evaluation(out: Path, *, retain: Path | None, target: Path | None, transform: str) -> str:
    """Write ``table.*`` and ``figures.*`` into ``out`` from the results there and of the references; as markdown."""
    files = {"Model": out / FILES[0], "Retain": retain, "Initial": target}
    there = {name: path for name, path in files.items() if path is not None}
    read = {name: read_result(path) for name, path in there.items()}
    summary = tofu_table(
        [read["Model"]], retain=read.get("Retain"), target=read.get("Initial"), transform=transform, details=True
    )
    found = {name: all_figures(path) for name, path in there.items()}
    known = [metric for metric in METRICS if any(metric in figures for figures in found.values())]
    rows = [Row(metric, tuple(TableCell(figures.get(metric)) for figures in found.values())) for metric in known]
    notes = ("Names and definitions are OpenUnlearning's.",)
    figures = Table(tuple(found), tuple(rows), notes, heading="metric", digits=4)
    tables = {"table": replace(summary.table, digits=3), "figures": figures}
    for stem, table in tables.items():
        write_table(table, out / stem)
    return "\n".join(render(table, "markdown") for table in tables.values())
