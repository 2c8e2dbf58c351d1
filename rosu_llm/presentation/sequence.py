"""A sequence of requests: what stays forgotten and what utility is left after each of them."""

from __future__ import annotations

from ..experiments.sequence.run import SequenceDocument
from .blocks import MISSING, Section, Table, Text, text_table
from .curves import Curve, Quantity, curves_figure

_PANELS = {
    "probability": Quantity("probability", "Probability", "p(answer)"),
    "exact_match": Quantity("exact_match", "Exact match", "share of tokens"),
}


def sequence_section(document: SequenceDocument) -> Section:
    """A row for each request, a column for each set; and the same as curves."""
    count = len({row["after"] for row in document["rows"]}) - 1
    said = f"{count} of {len(document['requests'])} requests, each from the model before; seed {document['seed']}."
    tables = [_table(document, key, quantity.title) for key, quantity in _PANELS.items()]
    if any(row["mia_auc"] is not None for row in document["rows"]):
        tables.append(_table(document, "mia_auc", "MIA AUC against the holdout set"))
    sets = list(dict.fromkeys(row["set"] for row in document["rows"]))
    panels = {}
    for key, quantity in _PANELS.items():
        curves = []
        for place, name in enumerate(sets):
            rows = [row for row in document["rows"] if row["set"] == name]
            points = [(float(row["after"]), float(row[key])) for row in rows]  # type: ignore[literal-required]
            curves.append(Curve(tuple(x for x, _ in points), tuple(y for _, y in points), name, place))
        panels[quantity] = curves
    figure = curves_figure("requests", "Every set after each request (step: number of requests)", panels)
    return Section("sequence", "Sequence of requests", [Text(said), figure, *tables])


def _table(document: SequenceDocument, key: str, title: str) -> Table:
    sets = list(dict.fromkeys(row["set"] for row in document["rows"]))
    rows = []
    for after in sorted({row["after"] for row in document["rows"]}):
        found = {row["set"]: row for row in document["rows"] if row["after"] == after}
        name = "before" if after == 0 else document["requests"][after - 1]["name"]
        cells = []
        for each in sets:
            value = found[each][key] if each in found else None  # type: ignore[literal-required]
            mark = " ✗" if each in found and found[each]["state"] == "forgotten" else ""
            cells.append(MISSING if value is None else f"{value:.3f}{mark}")
        rows.append((name, *cells))
    return text_table(title, ("after request", *sets), rows, notes=("✗: requested to be forgotten by then.",))
