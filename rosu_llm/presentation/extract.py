"""The extraction audit: a table of ways, leak@k and layers as figures, all beside the retain model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..analysis.extract.audit import ExtractDocument
from ..analysis.extract.ways import LENS, MEANING, SAMPLE
from .blocks import MISSING, Block, Section, Table, Text, text_table
from .charts import Panel, Series, along

_MEASURES = {"rouge": "ROUGE-L recall", "hit": "hits by ROUGE-L", "named": "hits by names"}


def extract_section(document: ExtractDocument) -> Section:
    """What was asked, the tables and figures, and what is missing."""
    settings = document["conditions"]
    models = "; ".join(f"{role}: {name}" for role, name in document["models"].items())
    said = (
        f"{document['questions']} questions; a hit is ROUGE-L recall ≥ {settings['threshold']:g}, or every name, "
        f"number and title of the answer; {settings['samples']} samples at temperature {settings['temperature']:g}, "
        f"seeds {', '.join(map(str, document['seeds']))}; 95 % bootstrap intervals over questions. {models}."
    )
    blocks: list[Block] = [Text(said)]
    lines = document["summary"]
    plain = [line for line in lines if line["way"] not in (SAMPLE, LENS)]
    if plain:
        blocks.append(_table(document, plain, "By way of asking"))
    drawn = [line for line in lines if line["way"] == SAMPLE]
    if drawn:
        table = _table(document, drawn, "Sampling")
        names = ("leak@{}", "leak@{}, named", "best rouge of {}")
        panels = [
            Panel(name.format("k"), _series(document, drawn, {k: name.format(k) for k in document["ks"]}), {})
            for name in names
        ]
        blocks += [along("audit_extract_leak", "Leak of k samples", "k", panels, table), table]
    lens = [line for line in lines if line["way"] == LENS]
    if lens:
        table = _table(document, lens, "Logit lens")
        layers = {int(line["measure"].split()[1]): line["measure"] for line in lens}
        panel = Panel("answer tokens that are the layer's first choice", _series(document, lens, layers), {})
        blocks += [along("audit_extract_lens", "What each layer would say", "layer", [panel], table), table]
    return Section("extract", "Extraction audit", [*blocks, *(Text(str(note)) for note in document["notes"])])


def _series(document: ExtractDocument, lines: Sequence[Mapping[str, Any]], at: Mapping[int, str]) -> list[Series]:
    """For each model the mean over seeds at each point."""
    series = []
    for role in document["models"]:
        points: list[tuple[float, float, float | None]] = []
        for x, measure in at.items():
            found = [
                line["means"][role]["mean"] for line in lines if line["measure"] == measure and role in line["means"]
            ]
            if found:
                points.append((float(x), sum(found) / len(found), None))
        if points:
            series.append(Series(role, points))
    return series


def _table(document: ExtractDocument, lines: Sequence[Mapping[str, Any]], caption: str) -> Table:
    roles = list(document["models"])
    rows = []
    for line in lines:
        measure = _MEASURES.get(line["measure"], line["measure"])
        means = [f"{line['means'][role]['mean']:.3f}" if role in line["means"] else MISSING for role in roles]
        gap = line.get("difference")
        shown = f"{gap['mean']:+.3f} [{gap['low']:+.3f}, {gap['high']:+.3f}]" if gap else MISSING
        rows.append((line["way"], measure, str(line["seed"]), *means, shown))
    columns = ("way", "measure", "seed", *roles, "unlearned − retain")
    notes = tuple(f"{way}: {MEANING[way]}." for way in dict.fromkeys(line["way"] for line in lines))
    return text_table(caption, columns, rows, notes=notes)
