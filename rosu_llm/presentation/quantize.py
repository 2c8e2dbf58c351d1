"""The quantisation audit: scores and figures beside full precision, Q, and what rounding leaves of the update."""

from __future__ import annotations

from ..analysis.quantize.audit import QuantizeDocument
from ..analysis.quantize.rounding import FULL
from .blocks import Block, Row, Section, Table, TableCell, Text
from .charts import Panel, Series, along

#: In the order of loss of precision.
_BITS = {FULL: 16, "rtn8": 8, "int8": 8, "rtn4": 4, "nf4": 4, "fp4": 4}
_MEANING = (
    "Q = min(after/before, 1) of figures for which more is better; those of what is remembered enter as 1 − m. "
    "Q_ctrl divides by the retain model's own loss: 1 where the unlearned model suffers no more than one that has "
    "nothing to hide."
)


def quantize_section(document: QuantizeDocument) -> Section:
    """What was rounded, the tables, a figure, and what is missing."""
    models = "; ".join(f"{role}: {name}" for role, name in document["models"].items())
    said = (
        f"Weights of linear layers rounded to {', '.join(document['precisions'])} (groups of {document['group_size']} "
        f"for rtn), computed in full precision; nothing is drawn, so there is no seed. {models}."
    )
    figures = _figures(document)
    blocks: list[Block] = [Text(said), figures, _ratios(document)]
    if document["buckets"]:
        blocks.append(_buckets(document))
    if document["remembered"]:
        shown = document["remembered"][:3]
        panels = [
            Panel(
                metric,
                [Series(role, points) for role in document["models"] if (points := _points(document, role, metric))],
                {},
            )
            for metric in shown
        ]
        axis = "bits per weight (16: full precision)"
        blocks.append(along("audit_quantize", "What is remembered by bits per weight", axis, panels, figures))
    return Section("quantize", "Quantisation audit", [*blocks, *(Text(str(note)) for note in document["notes"])])


def _points(document: QuantizeDocument, role: str, metric: str) -> list[tuple[float, float, float | None]]:
    """One point for each number of bits: of several precisions with as many, that which brings most back."""
    found: dict[int, float] = {}
    for cell in document["cells"]:
        if cell["role"] == role and metric in cell["figures"]:
            bits = _BITS[cell["precision"]]
            found[bits] = max(found.get(bits, 0.0), cell["figures"][metric])
    return [(float(bits), found[bits], None) for bits in sorted(found)]


def _figures(document: QuantizeDocument) -> Table:
    scores = [
        name for name in document["cells"][0]["scores"] if any(c["scores"][name] is not None for c in document["cells"])
    ]
    figures = list(dict.fromkeys(name for cell in document["cells"] for name in cell["figures"]))
    picked = [name for name in figures if name in document["remembered"] or name in ("model_utility", "mmlu")]
    rows = []
    for cell in document["cells"]:
        values = [TableCell(cell["scores"][name]) for name in scores]
        values += [TableCell(cell["figures"].get(name)) for name in picked]
        name = f"{cell['role']}, {cell['precision']}"
        rows.append(Row(name, tuple(values), reference=cell["role"] != "unlearned"))
    note = "Every TOFU figure is in the JSON." if document["benchmark"] == "tofu" else ""
    return Table(
        (*scores, *picked),
        tuple(rows),
        heading="model, precision",
        caption="Figures by precision",
        digits=3,
        notes=(note,) if note else (),
    )


def _ratios(document: QuantizeDocument) -> Table:
    rows = [
        Row(
            line["figure"],
            (
                TableCell(text=line["precision"]),
                *(TableCell(line.get(key)) for key in ("before", "after", "Q", "Q_symmetric", "Q_control")),
            ),
        )
        for line in document["ratios"]
    ]
    columns = ("precision", "before", "after", "Q", "Q_sym", "Q_ctrl")
    title = "What survives rounding: the unlearned model"
    return Table(columns, tuple(rows), heading="figure", caption=title, digits=3, notes=(_MEANING,))


def _buckets(document: QuantizeDocument) -> Table:
    keys = ("changed", "other_bucket", "update", "surviving")
    rows = [
        Row(precision, tuple(TableCell(found.get(key)) for key in keys))
        for precision, found in document["buckets"].items()
    ]
    return Table(
        ("changed weights", "in another bucket", "‖w−w₀‖/‖w₀‖", "‖Q(w)−Q(w₀)‖/‖w−w₀‖"),
        tuple(rows),
        heading="precision",
        caption="The update from the initial model, before and after rounding",
        digits=4,
        notes=(
            "Weights in the initial model's bucket are the initial model's again, whatever unlearning did to them.",
        ),
    )
