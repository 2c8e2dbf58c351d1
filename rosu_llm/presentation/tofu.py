"""The table of the paper from results: a row per run, the five scores, and below it what they rest on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..evaluation.aggregates import auc_transform
from ..evaluation.collection import check_comparable, unique_labels
from ..evaluation.results import Result
from ..evaluation.selection import best_by_agg_mu, describe, method_of
from ..evaluation.tofu.summary import ATTACKS, COLUMNS, FLUENCY, MODEL_UTILITY, TofuSummary, summarise
from .tables import Cell, Row, Table

ALL_METRICS = "+eval/tofu_metrics=[rosu_summary]"


@dataclass(frozen=True)
class Summarised:
    """A run with its scores."""

    label: str
    result: Result
    summary: TofuSummary

    @property
    def method(self) -> str:
        """The trainer that made it, as recorded, else as the run's name says."""
        return self.result.trainer or method_of(self.label)


@dataclass(frozen=True)
class TofuTable:
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
) -> TofuTable:
    """Summarise runs against their references.

    ``best`` keeps the run with the highest Agg_MU of each method, ``details`` adds Util as measured and the closeness
    of each attack. Fluency is left out of Util only when nobody has it, so that a column never mixes two definitions;
    the columns built on it then say so.
    """
    auc_transform(transform)
    references = [reference for reference in (target, retain) if reference is not None]
    check_comparable([*results, *references])
    with_fluency = any(FLUENCY in result.figures for result in [*results, *references])

    def summary(result: Result) -> TofuSummary:
        return summarise(
            result.figures,
            retain=retain.figures if retain else None,
            target=target.figures if target else None,
            transform=transform,
            with_fluency=with_fluency,
        )

    labels = unique_labels(results)
    runs = tuple(Summarised(label, r, summary(r)) for label, r in zip(labels, results, strict=True))
    shown, notes = runs, _notes([*results, *references], transform, target is not None, with_fluency)
    if best:
        methods = [run.method for run in runs]
        winners = best_by_agg_mu(methods, [run.summary.agg_mu for run in runs])
        shown = tuple(Summarised(method, runs[at].result, runs[at].summary) for method, at in winners.items())
        notes.append(describe(winners, methods, labels))
    named = [(name, result) for name, result in (("Initial", target), ("Retain", retain)) if result is not None]
    models = tuple(Summarised(name, result, summary(result)) for name, result in named)
    footnotes: list[str] = []
    rows = [_row(model, footnotes, details, reference=True) for model in models]
    rows += [_row(run, footnotes, details) for run in shown]
    suffix = "" if with_fluency else " (MU only)"
    columns = tuple(column + ("" if column in ("Mem", "Priv") else suffix) for column in COLUMNS)
    if details:
        columns += (f"Util raw{suffix}", *(f"s_{attack}" for attack in ATTACKS))
    return TofuTable(runs, models, Table(columns, tuple(rows), tuple(notes), tuple(footnotes)))


def _row(run: Summarised, footnotes: list[str], more: bool, *, reference: bool = False) -> Row:
    cells = []
    for column, value in run.summary.columns().items():
        mark = None
        if value is None:
            text = _why(run, column)
            if text not in footnotes:
                footnotes.append(text)
            mark = footnotes.index(text) + 1
        cells.append(Cell(value, mark))
    if more:
        cells += [Cell(run.summary.util_raw), *(Cell(run.summary.closeness.get(attack)) for attack in ATTACKS)]
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
    unusable = [f"{name} is {why} in the file" for name, why in run.result.unusable.items() if name in needs]
    others = [name for name in needs if name not in run.result.unusable]
    text = f"{column} needs {', '.join(others)}" if others else f"{column} is unknown"
    if any(name in run.summary.columns() for name in others):
        return text + "."
    how = []
    if "the results of the retain model" in others:
        how.append("give --retain")
    if "the results of the initial model" in others:
        how.append("give --target")
    if any(not name.startswith(("the results", "an initial")) for name in others):
        how.append("evaluate without --metrics" if run.result.sidecar else f"evaluate with {ALL_METRICS}")
    return text + (f": {', '.join(how)}" if how else "") + (f" ({'; '.join(unusable)})" if unusable else "") + "."


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
    notes.append(
        f"Util: {parts}, "
        + (
            "relative to the initial model; so it enters Agg and Agg_MU."
            if relative
            else "raw, not relative to the initial model (give --target); so it enters Agg and Agg_MU."
        )
    )
    limits = {limit for result in results if (limit := result.sidecar.get("conditions", {}).get("limit"))}
    if limits:
        notes.append(f"LIMITED to the first {max(limits)} rows of each data set: a trial, not a benchmark result.")
    if any(result.derived_truth_ratio for result in results):
        notes.append("The truth ratio in Mem was formed from the losses per question in the files.")
    return notes
