"""A diagnosis of the coupling (``diagnosis.json``): tables, figures and advice."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..analysis.coupling.diagnosis import SCHEMA, CouplingDocument
from ..errors import DataError
from ..files import read_json, write_json
from .blocks import MISSING, Block, Figure, Row, Section, Table, TableCell, Text, shown, text_table
from .charts import heat_map
from .drawing import legend
from .writers import print_section, write_page

logger = logging.getLogger(__name__)

FILE = "diagnosis.json"
#: Parts shown on the terminal; all are in the files.
TOP_PARTS = 8

Document = Mapping[str, Any]

_LABELS = {"standard": "standard δ = ρ f/‖f‖", "neutral": "retain-neutral δ = ρ q/‖q‖"}
_COLOURS = {"standard": "C1", "neutral": "C0"}
_STATISTICS = ("mean", "std", "min", "median", "max")
_QUANTITIES = {
    "cosine": "cos θ",
    "sine": "sin θ (forget gain kept)",
    "forget_norm": "‖f‖",
    "retain_norm": "‖r‖",
    "retain_square": "‖r‖²",
    "q_norm": "‖q‖",
    "tau_residue": "τ/(‖r‖²+τ)",
    "forget_loss": "L_f",
    "retain_loss": "L_r",
}


def coupling_section(document: CouplingDocument, *, brief: bool = False) -> Section:
    """Advice, figures and tables; ``brief`` leaves out the setup and the tables of single radii and parts."""
    said = [Text(document["advice"]["text"], strong=True)]
    layers = _parts_table("Coupling by layer", document["by_layer"], "layer")
    figures = [_cosines(document), _parts(document)]
    if document.get("full_batch"):  # older files have none
        figures.append(_growth_figure(document))
    if document["segments"]["standard"].get("retain_change"):  # not every pair fell back
        figures.append(_segments(document))
    tables = [_overall(document, 4), replace(layers, folded=True)]
    if not brief:
        setup, settings = document["setup"], document["settings"]
        plural = "es" if setup["processes"] > 1 else ""
        what = (
            f"Model {setup['model'] or 'in memory'}, {setup['parameters']:,} trainable parameters, {setup['layout']} "
            f"on {setup['processes']} process{plural}; {setup['forget_samples']} samples to forget, "
            f"{setup['retain_samples']} to keep; forget loss {settings['forget_loss']}, retain loss "
            f"{settings['retain_loss']}; seed {settings['seed']}. No weight was changed."
        )
        said += [Text(what), *map(Text, _left_out(document))]
        tables = [*screen_tables(document)[:-1], layers, _by_contribution(document)]
    return Section("diagnosis", "Coupling diagnosis", [*said, *figures, *tables])


def _left_out(document: Document) -> list[str]:
    return [f"pair {entry['pair']} left out: {entry['reason']}" for entry in document["skipped"]]


def screen_tables(document: Document) -> list[Table]:
    """The tables that the terminal shows; of the parts only those that contribute most."""
    kinds = _parts_table("Coupling by kind of parameter", document["by_kind"], "kind")
    parts = _by_contribution(document, TOP_PARTS)
    grown = [_growth(document)] if document.get("full_batch") else []
    return [_overall(document), *grown, _effects(document), _radius(document), kinds, parts]


def _overall(document: Document, digits: int = 3) -> Table:
    """Statistics over mini-batch pairs of what was measured for each."""
    coupling = document["coupling"]
    rows = [
        (label, *(shown(coupling[name].get(key), digits) for key in _STATISTICS))
        for name, label in _QUANTITIES.items()
        if coupling.get(name)
    ]
    note = (
        f"{document['pairs_used']} pairs of {document['settings']['forget_batch_size']} forget and "
        f"{document['settings']['retain_batch_size']} retain samples; cos θ > 0 in {coupling['positive_share']:.0%}; "
        f"{coupling['fallbacks']} would fall back to plain retain descent; {len(document['skipped'])} left out."
    )
    return text_table("Coupling over mini-batch pairs", ("quantity", *_STATISTICS), rows, notes=(note,))


def _growth(document: Document) -> Table:
    """cos θ by batch size, and its limit: all samples."""
    whole, setup = document["full_batch"], document["setup"]
    rows = [
        (
            *(str(point[f"{part}_batch_size"]) for part in ("forget", "retain")),
            str(point["pairs"]),
            *(shown(point[name][key], 3) for name in ("cosine", "retain_alignment") for key in ("mean", "std")),
        )
        for point in whole["curve"]
    ]
    limit = shown(whole["coupling"]["cosine"]["mean"], 3)
    rows.append((str(setup["forget_samples"]), str(setup["retain_samples"]), "all", limit, MISSING, "1", MISSING))
    columns = ("forget", "retain", "pairs", "cos θ", "std", "cos(r, r_all)", "std")
    note = (
        "Samples per batch; cos(r, r_all): cosine of the batch's retain gradient with that of all retain samples. Last "
        "row: all samples, the limit."
    )
    return text_table("cos θ by batch size", columns, rows, notes=(note,))


def _growth_figure(document: Document) -> Figure:
    whole = document["full_batch"]
    sizes = [point["retain_batch_size"] for point in whole["curve"]]
    limit, total = whole["coupling"]["cosine"]["mean"], document["setup"]["retain_samples"]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for name, label, color in (("cosine", "cos θ", "C0"), ("retain_alignment", "cos(r, r_all)", "C2")):
            means = [point[name]["mean"] for point in whole["curve"]]
            spread = [point[name]["std"] or 0.0 for point in whole["curve"]]
            axes.errorbar(sizes, means, yerr=spread, color=color, marker="o", markersize=3, capsize=2, label=label)
        axes.axhline(limit, color="C0", linestyle=":", linewidth=1.4, label=f"all samples: {limit:.3f}")
        axes.plot([total], [limit], "D", color="C0", markersize=4)
        axes.axhline(0.0, color="0.6", linewidth=0.9, zorder=0)
        axes.set(xscale="log", xlabel="retain samples per batch", ylabel="cosine", ylim=(-1.05, 1.05))
        legend(figure, axes, columns=3)

    title = "cos θ by batch size"
    alt = f"{title}: " + ", ".join(
        f"{n}: {shown(point['cosine']['mean'], 3)}" for n, point in zip(sizes, whole["curve"], strict=True)
    )
    caption = f"{title}: mean and standard deviation over pairs; dotted, the limit."
    return Figure("diagnosis_batch_size", title, f"{alt}; all: {shown(limit, 3)}.", draw, _growth(document), caption)


def _effects(document: Document) -> Table:
    columns = ("ρ", "δ", "⟨r,δ⟩", "2nd", "ΔL_r", "⟨f,δ⟩", "2nd", "ΔL_f", "ahead")
    keys = [f"retain_{name}" for name in ("first_order", "second_order", "change")]
    keys += [f"forget_{name}" for name in ("first_order", "second_order", "gain")]
    rows = []
    for row in document["at_rho"]:
        ahead = MISSING if row["advantage_share"] is None else f"{row['advantage_share']:.0%}"
        for name, label, last in (("standard", "std", ""), ("neutral", "rosu", ahead)):
            rows.append((f"{row['rho']:g}", label, *(shown(row[name][key], 3) for key in keys), last))
    note = (
        "Means over pairs. std: standard perturbation ρf/‖f‖; rosu: retain-neutral one ρq/‖q‖. ΔL: measured, first "
        "order ⟨·,δ⟩ plus second-order part (2nd). ahead: pairs with L_r(w+δ_std) > L_r(w+δ_rosu)."
    )
    return text_table("Both perturbations: retain change and forget gain", columns, rows, notes=(note,))


def _radius(document: Document) -> Table:
    radius, curvature = document["radius"], document["curvature"]
    crossing = shown(radius["mean_crossing"], 3)
    if radius["mean_crossing"] is None and (document["coupling"]["cosine"]["mean"] or 0.0) > 0.0:
        crossing = f"> {radius['max_rho']:g}"
    measured = {
        "uᵀ∇²L_r u along the standard perturbation": curvature["standard"],
        "uᵀ∇²L_r u along the retain-neutral one": curvature["neutral"],
        "M_r, the largest 2·|2nd order|/ρ² along both": curvature["bound"],
        "ρ*: guaranteed, cos θ > M_r ρ/‖r‖ ends": radius["guaranteed"],
        "ρ at which the measured losses cross": radius["crossing"],
    }
    rows = [(name, *(shown(found[key], 3) for key in ("q05", "median", "q95"))) for name, found in measured.items()]
    rows.append(("ρ at which their means cross", MISSING, crossing, MISSING))
    note = "No pair has cos θ > 0: there is no first-order advantage that curvature could remove."
    if radius["crossed_share"] is not None:
        note = (
            f"Over pairs with cos θ > 0, of which {radius['crossed_share']:.0%} cross up to ρ = {radius['max_rho']:g}; "
            "a ρ* beyond it is extrapolated."
        )
    return text_table("How far the advantage reaches", ("quantity", "5 %", "median", "95 %"), rows, notes=(note,))


def _by_contribution(document: Document, top: int | None = None) -> Table:
    parts = sorted(document["by_part"], key=lambda row: -abs(row["contribution"] or 0.0))
    return _parts_table("Parts that contribute most to cos θ", parts[:top], "part")


def _parts_table(caption: str, rows: Sequence[Mapping[str, Any]], heading: str) -> Table:
    """Coupling by part of the model: ``layer 3 · q``, ``q`` or ``layer 3``."""
    columns = ("parameters", "cos θ", "std", "in cos θ", "of ‖f‖²", "of ‖r‖²")
    keys = ("cosine", "cosine_std", "contribution", "forget_share", "retain_share")
    made = []
    for row in rows:
        layer = None if row["layer"] is None else f"layer {row['layer']}"
        name = " · ".join(word for word in (layer, row["kind"]) if word) or "outside the layers"
        made.append(Row(name, (TableCell(text=f"{row['parameters']:,}"), *(TableCell(row[key]) for key in keys))))
    note = "in cos θ: contribution ⟨f,r⟩_part/(‖f‖‖r‖); over all parts they add up to cos θ. of ‖·‖²: share."
    return Table(columns, tuple(made), (note,), heading=heading, caption=caption, digits=3)


def _cosines(document: Document) -> Figure:
    cosines = [float(pair["cosine"]) for pair in document["per_pair"]]
    mean, low, high = sum(cosines) / len(cosines), min(cosines), max(cosines)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.hist(cosines, bins=min(20, max(5, len(cosines) // 2)), color="C0", alpha=0.55, edgecolor="white")
        top = axes.get_ylim()[1]
        axes.plot(cosines, [-0.04 * top] * len(cosines), "|", color="0.5", markersize=9)
        axes.axvline(mean, color="C1", linewidth=1.6)
        axes.set_title(f"mean cos θ = {mean:.3f}", fontsize=9)
        margin = max(0.05, 0.15 * (high - low))
        if low - margin < 0.0 < high + margin:
            axes.axvline(0.0, color="0.5", linewidth=0.9)
        axes.set(xlim=(max(-1.02, low - margin), min(1.02, high + margin)), ylim=(-0.1 * top, top))
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set(xlabel="cos θ between forget and retain gradient, one tick per pair", ylabel="mini-batch pairs")

    histogram = document["coupling"]["histogram"]
    edges = [shown(float(edge), 3) for edge in histogram["edges"]]
    rows = [(f"{a} … {b}", str(n)) for a, b, n in zip(edges, edges[1:], histogram["counts"], strict=False)]
    title = "cos θ over mini-batch pairs"
    alt = f"Histogram of cos θ over {document['pairs_used']} pairs."
    return Figure("diagnosis_cosine", title, alt, draw, text_table(title, ("cos θ", "pairs"), rows), f"{title}.")


def _parts(document: Document) -> Figure:
    parts = {(row["layer"], row["kind"]): row["cosine"] for row in document["by_part"]}
    draw, size = heat_map(parts, "mean cos θ of the part", (-1.0, 1.0))
    title = "cos θ by layer and kind of parameter"
    alt = f"Heat map of the mean cos θ of {len(parts)} parts of the model."
    return Figure("diagnosis_parts", title, alt, draw, _by_contribution(document), f"{title}.", size)


def _segments(document: Document) -> Figure:
    """L_r and L_f along both perturbations: mean and spread over pairs, first order dotted."""
    segments = document["segments"]
    rho = [float(value) for value in segments["rho"]]
    retain = ("retain_change", "retain_first_order", "retain loss (lower is better)")
    forget = ("forget_gain", "forget_first_order", "forget loss (higher is better)")

    def draw(figure: Any) -> None:
        drawn = figure.subplots(2, 1, sharex=True)
        for axes, (key, first_order, title) in zip(drawn, (retain, forget), strict=True):
            reach: list[float] = []
            for name, color in _COLOURS.items():
                curve = segments[name]
                spread = [value or 0.0 for value in curve[f"{key}_std"]]
                low, high = ([m + sign * s for m, s in zip(curve[key], spread, strict=True)] for sign in (-1, 1))
                reach += [*low, *high]
                axes.plot(rho, curve[key], color=color, marker="o", markersize=3, label=_LABELS[name])
                axes.fill_between(rho, low, high, color=color, alpha=0.15, linewidth=0)
                axes.plot(rho, curve[first_order], color=color, linestyle=":", linewidth=1.4)
            axes.plot([], [], color="0.5", linestyle=":", label="first order")
            axes.axvline(document["settings"]["rho"], color="0.6", linewidth=0.9, zorder=0)
            axes.axhline(0.0, color="0.6", linewidth=0.9, zorder=0)
            # What was measured sets the scale: first-order lines may run far out of it.
            room = 0.15 * ((max(reach) - min(reach)) or 1.0)
            axes.set(ylim=(min(reach) - room, max(reach) + 2 * room), ylabel="change of the loss")
            axes.set_title(title, fontsize=9)
        drawn[1].set_xlabel("radius ρ")
        legend(figure, drawn[0], columns=1)

    keys = [(name, key) for key in (*retain[:2], *forget[:2]) for name in _LABELS]
    rows = [tuple(map(shown, values)) for values in zip(rho, *(segments[name][key] for name, key in keys), strict=True)]
    title = "Losses along both perturbations"
    data = text_table(title, ("ρ", *(f"{name}: {key.replace('_', ' ')}" for name, key in keys)), rows)
    ends = ", ".join(f"{name} {shown(segments[name]['retain_change'][-1])}" for name in _LABELS)
    alt = f"{title}; the retain loss changes at ρ = {shown(rho[-1])} by: {ends}."
    caption = f"{title}. Dotted: what first order predicts."
    return Figure("diagnosis_segments", title, alt, draw, data, caption, (5.0, 5.2))


def write_diagnosis(document: CouplingDocument, folder: Path) -> list[Path]:
    """Write everything; without matplotlib there are no figures, and a line says why."""
    write_json(folder / FILE, document)
    written, problem = write_page(coupling_section(document), folder / "diagnosis.md")
    if problem:
        logger.warning("%s", problem)
    return [folder / FILE, *written]


def print_diagnosis(document: CouplingDocument) -> None:
    """Tables and advice on the terminal."""
    from rich.console import Console

    advice = Text(document["advice"]["text"], strong=True)
    blocks: list[Block] = [*screen_tables(document), *map(Text, _left_out(document)), advice]
    print_section(Section("diagnosis", "Coupling diagnosis", blocks), Console())


def read_diagnosis(path: Path) -> dict[str, Any]:
    """The content of a diagnosis.json; DataError where it is none."""
    found = read_json(path)
    if found.get("schema") != SCHEMA:
        raise DataError(f"{path} is no diagnosis of schema {SCHEMA!r}: write one with 'rosu diagnose'.")
    return found
