"""A comparison in the shape of the paper's Table 3 (TOFU), with its figures beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev

from ..experiments.contest import ContestDocument
from ..experiments.sweep.scoring import SELECTED_BY, Scores
from .blocks import Footnotes, Row, Section, Table, TableCell, Text, printed
from .contest import search_table

COLUMNS = ("Agg", "Mem", "Priv", "Util")
#: Places of the same columns in the paper's rows (Agg, Agg_MU, Mem, Priv, Util).
_PAPER = (0, 2, 3, 4)
_REFERENCES = {"Init. ft.": "initial", "Retain": "retain"}
NOT_COMPARABLE = (
    "The paper's figures are of Llama-3.2-1B-Instruct on TOFU forget10, ours of the task named above, with another "
    "model, data, budget and (but for TOFU itself) other definitions of the scores: the two halves do not compare. "
    "Only the order of rows within a half means anything."
)


def table3_section(content: ContestDocument, rows: Mapping[str, str]) -> Section:
    """The table, and what was searched for it; ``rows`` are the paper's names of the contestants."""
    seeds = ", ".join(map(str, content["seeds"]))
    said = (
        f"Task: {content['task'].get('task')}. Every row tried {len(content['entries'][0]['trials'])} settings on seed "
        f"{content['search_seed']}; the one with the highest {SELECTED_BY} was run on seeds {seeds}. "
        f"{content['definition']}"
    )
    return Section("table3", "The paper's Table 3, TOFU", [Text(said), table3(content, rows), search_table(content)])


def table3(content: ContestDocument, rows: Mapping[str, str]) -> Table:
    """Mean ± standard deviation over the reported seeds, then what the paper prints."""
    paper, footnotes, found = printed("tofu"), Footnotes(), []
    for label, name in _REFERENCES.items():
        known = [own[name] for own in content["reference_scores"].values() if name in own]
        if known:
            known = known[:1] if all(own == known[0] for own in known) else known  # one model for all seeds
            found.append(Row(label, (*_ours(known), *_theirs(paper.get(label))), reference=True))
    by_name = {entry["name"]: entry for entry in content["entries"]}
    for label, name in rows.items():
        entry = by_name[name]
        errors = sorted({own["error"] for own in entry["per_seed"] if own["error"] is not None})
        footnote = footnotes.mark(" ".join(f"failed: {error}" for error in errors))
        done = [own["scores"] for own in entry["per_seed"] if own["error"] is None]
        details = {"selected": entry["selected"], "per_seed": entry["per_seed"]}
        found.append(Row(label, (*_ours(done, footnote), *_theirs(paper.get(label))), details=details))
    missing = [label for label in paper if label not in rows and label not in _REFERENCES]
    left_out = (f"Not in this table: {', '.join(missing)}.",) if missing else ()
    heads = (*COLUMNS, *(f"{name} (paper)" for name in COLUMNS))
    return Table(heads, tuple(found), (NOT_COMPARABLE, *left_out), tuple(footnotes), caption="Table 3, TOFU", digits=2)


def _ours(scores: Sequence[Scores], footnote: int | None = None) -> tuple[TableCell, ...]:
    cells = []
    for name in COLUMNS:
        values = [value for own in scores if (value := own[name]) is not None]
        spread = stdev(values) if len(values) > 1 else None
        cells.append(TableCell(mean(values), footnote, spread) if values else TableCell(footnote=footnote))
    return tuple(cells)


def _theirs(figures: Sequence[float | None] | None) -> tuple[TableCell, ...]:
    return tuple(TableCell(None if figures is None else figures[at]) for at in _PAPER)
