"""The trials as a table: best first, then what was pruned and what failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..experiments.sweep.collect import DONE, KILLED
from ..experiments.sweep.task import SCORES, SELECTED_BY
from .tables import MISSING, Cell, Row, Table, number

_REFERENCES = {"initial": "initial model", "retain": "retain model"}


def sweep_table(content: Mapping[str, Any]) -> Table:
    """Settings that were searched, the five scores, state and seconds of every trial; killed attempts are left out."""
    keys = list(content["space"])
    footnotes: list[str] = []
    rows = [
        _row(_REFERENCES[name], None, {}, entry["scores"], keys, reference=True)
        for name, entry in content["references"].items()
    ]
    shown = [trial for trial in content["trials"] if trial["state"] != KILLED]
    for trial in sorted(shown, key=lambda trial: (trial["rank"] or len(shown) + 1, trial["state"], trial["number"])):
        footnote = None
        if trial["error"]:
            if trial["error"] not in footnotes:
                footnotes.append(trial["error"])
            footnote = footnotes.index(trial["error"]) + 1
        rows.append(
            _row(f"trial {trial['number']}", trial["rank"], trial["settings"], trial["scores"], keys, trial, footnote)
        )
    headings = [content["headings"][name] for name in SCORES]
    columns = ("rank", *keys, *headings, "state", "seconds")
    return Table(columns, tuple(rows), _notes(content), tuple(footnotes))


def _row(
    label: str,
    rank: int | None,
    settings: Mapping[str, Any],
    scores: Mapping[str, float | None],
    keys: list[str],
    trial: Mapping[str, Any] | None = None,
    footnote: int | None = None,
    *,
    reference: bool = False,
) -> Row:
    cells = [Cell(None, text=None if rank is None else str(rank))]
    cells += [Cell(None, text=shown(settings[key]) if key in settings else None) for key in keys]
    cells += [Cell(scores.get(name)) for name in SCORES]
    seconds = trial["seconds"] if trial else None
    cells += [
        Cell(None, footnote, text=trial["state"] if trial else None),
        Cell(None, text=None if seconds is None else f"{seconds:.0f}"),
    ]
    return Row(label, tuple(cells), reference, {"figures": trial["figures"]} if trial else {})


def screen(table: Table, content: Mapping[str, Any], digits: int) -> Any:
    """The same for a terminal of 80 columns: all settings in one column."""
    from rich.table import Table as RichTable

    count = len(content["space"])
    result = RichTable(title=f"Study {content['study']}", padding=(0, 1, 0, 0), box=None, header_style="bold")
    for heading in ("rank", "trial", "settings", *SCORES, "state", "s"):
        result.add_column(heading, no_wrap=heading != "settings", justify="left" if heading == "settings" else "right")
    for row in table.rows:
        rank, *cells = [(c.text or MISSING) if c.value is None else number(c.value, digits) for c in row.cells]
        pairs = zip(content["space"], cells[:count], strict=True)
        settings = row.label if row.reference else ", ".join(f"{key} {value}" for key, value in pairs)
        note = row.cells[-2].footnote
        cells[-2] += "" if note is None else f" \\[{note}]"
        result.add_row(rank, MISSING if row.reference else row.label.removeprefix("trial "), settings, *cells[count:])
    return result


def shown(value: Any) -> str:
    """A setting as text; numbers with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _notes(content: Mapping[str, Any]) -> tuple[str, ...]:
    states = [trial["state"] for trial in content["trials"]]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    notes = [
        f"Ranked by {SELECTED_BY} alone. Trials: " + ", ".join(f"{n} {state}" for state, n in counts.items()) + "."
    ]
    notes += content["notes"]
    if "pruned" in states:
        notes.append(f"Pruned: ended early because of {content['pruned_by']}.")
    if content["importance"]:
        shares = ", ".join(f"{key} {share:.2f}" for key, share in content["importance"].items())
        notes.append(f"Importance for {SELECTED_BY} (fANOVA over {states.count(DONE)} trials): {shares}.")
    return tuple(notes)
