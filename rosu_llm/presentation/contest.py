"""A comparison of methods: figures over fresh seeds, closest to the retrained model first, and what was searched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from ..experiments.attempt import ANSWER_COLUMNS
from ..experiments.contest import DISTANCE, ContestDocument, ContestEntry, paired_differences, ranking, sign_flip_p
from ..experiments.sweep.scoring import SCORES, SELECTED_BY
from .blocks import Block, Footnotes, Row, Section, Table, TableCell, Text, shown, text_table

FIGURES = {**{name: ANSWER_COLUMNS[name] for name in DISTANCE}, "degenerate": "degenerate"}
BOUND_NOTE = "* forgets until the level of held-out samples that no figure uses: such rows know more than others."


def contest_section(content: ContestDocument) -> Section:
    """The table of fresh seeds, the paired tests, and the search."""
    seeds = ", ".join(map(str, content["seeds"]))
    said = (
        f"Every method tried {len(content['entries'][0]['trials'])} settings on seed {content['search_seed']}: the "
        f"same combinations of {' and '.join(content['common'])}, each with values of its own settings. The highest "
        f"{SELECTED_BY} was run on seeds {seeds}. {content['definition']}"
    )
    tests = [Text(line) for line in paired_tests(content["entries"])]
    blocks: list[Block] = [Text(said), *result_tables(content), *tests, search_table(content)]
    return Section("comparison", "Comparison of methods", blocks)


def result_tables(content: ContestDocument) -> list[Table]:
    """Mean ± standard deviation over the fresh seeds; rows that failed somewhere stand last and say why."""
    ranked = ranking(content["entries"])
    entries = [*ranked, *(entry for entry in content["entries"] if entry not in ranked)]
    footnotes, figures, scores = Footnotes(), [], []
    for name, label in (("initial", "before"), ("retain", "retrained (gold)")):
        known = [own[name] for own in content["references"].values()]
        if all(own == known[0] for own in known):  # one model for all seeds
            known = known[:1]
        cells = (*(_spread([one.get(key) for one in known]) for key in FIGURES), TableCell())
        figures.append(Row(label, cells, reference=True))
    for entry in entries:
        done = [own for own in entry["per_seed"] if own["error"] is None]
        errors = sorted({own["error"] for own in entry["per_seed"] if own["error"] is not None})
        footnote = footnotes.mark(" ".join(f"failed: {error}" for error in errors))
        cells = (
            *(_spread([own["figures"].get(key) for own in done], footnote) for key in FIGURES),
            _spread([own["distance"] for own in done]),
        )
        details = {"selected": entry["selected"], "per_seed": entry["per_seed"]}
        figures.append(Row(entry["label"], cells, details=details))
        scores.append(Row(entry["label"], tuple(_spread([own["scores"][key] for own in done]) for key in SCORES)))
    parts = ", ".join(ANSWER_COLUMNS[name] for name in DISTANCE)
    notes = (
        f"Mean ± standard deviation over {len(content['seeds'])} seeds that no setting was chosen on. Sorted by "
        f"distance, the sum of the differences to the retrained model in {parts}.",
        BOUND_NOTE,
    )
    heads = (*FIGURES.values(), "distance")
    return [
        Table(heads, tuple(figures), notes, tuple(footnotes), caption="Fresh seeds: figures", digits=3),
        Table(SCORES, tuple(scores), caption="Fresh seeds: scores, in the same order", digits=3),
    ]


def paired_tests(entries: Sequence[ContestEntry]) -> list[str]:
    """The first against the second, seed by seed: all methods by distance, then those without a bound, then by Agg."""
    lines = []
    plain = [
        entry
        for entry in entries
        if "forget_until" not in entry["selected"] or entry["selected"]["forget_until"] == "off"
    ]
    for words, group in (("All methods", entries), ("Methods without a bound", plain)):
        ranked = ranking(group)
        if len(ranked) < 2 or len(ranked[0]["per_seed"]) < 2:
            continue
        first, second = ranked[:2]
        differences = paired_differences(first, second)
        lines.append(
            f"{words}: {first['label']} is closest, by {mean(differences):.3f} in distance before {second['label']} "
            f"(exact paired sign-flip test over {len(differences)} seeds, p = {sign_flip_p(differences):.3f})."
        )
    return lines


def search_table(content: ContestDocument) -> Table:
    """For each method the range of Agg_MU over its trials, how many failed, and the settings selected."""
    rows = []
    for entry in content["entries"]:
        values = [trial["scores"][SELECTED_BY] for trial in entry["trials"] if trial["scores"] is not None]
        own = _varied(entry)
        text = ", ".join(f"{key} {shown(value)}" for key, value in own.items())
        failed = sum(trial["error"] is not None for trial in entry["trials"])
        rows.append((entry["label"], f"{min(values):.3f}", f"{max(values):.3f}", str(failed), text))
    columns = ("method", "lowest", "highest", "failed", "selected")
    caption = f"Search: {SELECTED_BY} of the trials on seed {content['search_seed']}"
    return text_table(caption, columns, rows)


def _varied(entry: ContestEntry) -> dict[str, Any]:
    """The selected settings that differ between trials."""
    trials: Sequence[Mapping[str, Any]] = [trial["settings"] for trial in entry["trials"]]
    values = {key: {repr(trial.get(key)) for trial in trials} for key in entry["selected"]}
    return {key: value for key, value in entry["selected"].items() if len(values[key]) > 1}


def _spread(values: Sequence[float | None], footnote: int | None = None) -> TableCell:
    known = [value for value in values if value is not None]
    if not known:
        return TableCell(footnote=footnote)
    return TableCell(mean(known), footnote, stdev(known) if len(known) > 1 else None)
