"""The relearning audit: a table of R, areas and half-lives, and the curves of every metric."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from ..analysis.relearn.audit import RelearnDocument, courses
from .blocks import Block, Row, Section, Table, TableCell, Text
from .curves import Curve, Quantity, curves_figure

_MEANING = (
    "R = min(Δ_retain/Δ_unlearned, 1): 1 where the attack brings back no more than it teaches a model that never saw "
    "the data, 0 where it brings back far more; R_sym also falls where the model learns less than the control.",
    "Area: mean distance of the unlearned model's curve above the retain model's. Half: the first evaluated step at "
    "which half of the gap to the initial model is back, of the unlearned and of the retain model.",
)
_COLUMNS = {
    "before": "before",
    "after": "after",
    "retain_gain": "Δ retain",
    "gain": "Δ unlearned",
    "R": "R",
    "R_symmetric": "R_sym",
    "area": "area",
    "half": "half",
    "retain_half": "half, retain",
}


def relearn_section(document: RelearnDocument) -> Section:
    """What was done, a table, a figure for each share, and what is missing."""
    attack = document["attack"]
    how = f"LoRA r={attack['lora_r']} α={attack['lora_alpha']}" if attack["lora_r"] else "all weights"
    models = "; ".join(f"{role}: {name}" for role, name in document["models"].items())
    said = (
        f"Fine-tuning on {attack['on']}: {how}, learning rate {attack['learning_rate']:g}, batch "
        f"{attack['batch_size']}, seeds {', '.join(map(str, document['seeds']))}. {models}."
    )
    blocks: list[Block] = [Text(said)]
    if document["summary"]:
        blocks.append(_table(document))
    metrics = list(dict.fromkeys(name for cell in document["cells"] for name in cell["figures"]))
    for share in document["shares"]:
        panels = {}
        for metric in metrics:
            panels[Quantity(metric, metric, metric)] = [
                Curve(tuple(map(float, steps)), values, role, at)
                for at, (role, (steps, values)) in enumerate(_means(document, metric, share).items())
            ]
        title = f"Relearning on {attack['on']}, share {share:g} ({document['rows'][f'{share:g}']} rows)"
        blocks.append(curves_figure(f"audit_relearn_{share:g}".replace(".", "_"), title, panels))
    return Section("relearn", "Relearning audit", [*blocks, *(Text(str(note)) for note in document["notes"])])


def _means(document: RelearnDocument, metric: str, share: float) -> dict[str, tuple[list[int], tuple[float, ...]]]:
    """Role → steps, and the mean over seeds at each."""
    found = {}
    for role, seeds in courses(document["cells"], metric, share).items():
        steps = sorted(set.intersection(*(set(course) for course in seeds.values())))
        found[role] = (steps, tuple(mean(course[step] for course in seeds.values()) for step in steps))
    return found


def _table(document: RelearnDocument) -> Table:
    lines = document["summary"]
    known = {key for line in lines for values in line["per_seed"].values() for key in values}
    keys = [key for key in _COLUMNS if key in known]
    rows = [
        Row(line["metric"], (TableCell(text=f"{line['share']:g}"), *(_cell(line, key) for key in keys)))
        for line in lines
    ]
    columns = ("share", *(_COLUMNS[key] for key in keys))
    title = "What the attack brought back"
    return Table(columns, tuple(rows), heading="metric", caption=title, digits=3, notes=_MEANING)


def _cell(line: Mapping[str, Any], key: str) -> TableCell:
    if key in ("half", "retain_half"):
        steps = {values.get(key) for values in line["per_seed"].values()}
        return TableCell(text=" / ".join(sorted("never" if step is None else str(step) for step in steps)))
    return TableCell(line["mean"].get(key), spread=line["spread"].get(key))
