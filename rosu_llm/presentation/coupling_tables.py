"""A diagnosis as tables: on the terminal and as markdown, the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MISSING = "–"
#: Parts shown on the terminal; all are in the files.
TOP_PARTS = 8


@dataclass(frozen=True)
class Sheet:
    """A titled table of text cells, the first column being labels."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def sheets(document: Mapping[str, Any], *, whole: bool) -> list[Sheet]:
    """All tables of a diagnosis; without ``whole`` only the parts that contribute most."""
    parts = sorted(document["by_part"], key=lambda row: -abs(row["contribution"] or 0.0))
    top = parts if whole else parts[:TOP_PARTS]
    kinds = _parts("Coupling by kind of parameter", document["by_kind"], "kind")
    layers = _parts("Coupling by layer", document["by_layer"], "layer")
    most = _parts("Parts that contribute most to cos θ", top, "part")
    return [_overall(document), _effects(document), _radius(document), kinds, *([layers] if whole else []), most]


def _overall(document: Mapping[str, Any]) -> Sheet:
    coupling = document["coupling"]
    labels = {
        "cosine": "cos θ",
        "sine": "sin θ (forget gain kept)",
        "forget_norm": "‖f‖",
        "retain_norm": "‖r‖",
        "retain_square": "‖r‖²",
        "q_norm": "‖q‖",
        "forget_loss": "L_f",
        "retain_loss": "L_r",
    }
    keys = ("mean", "std", "min", "median", "max")
    rows = [(label, *(_number(coupling[name][key]) for key in keys)) for name, label in labels.items()]
    note = (
        f"{document['pairs_used']} pairs of {document['settings']['forget_batch_size']} forget and "
        f"{document['settings']['retain_batch_size']} retain samples; cos θ > 0 in {coupling['positive_share']:.0%}; "
        f"{coupling['fallbacks']} would fall back to plain retain descent; {len(document['skipped'])} left out."
    )
    return Sheet("Coupling over mini-batch pairs", ("", "mean", "std", "min", "median", "max"), tuple(rows), note)


def _effects(document: Mapping[str, Any]) -> Sheet:
    columns = ("ρ", "δ", "⟨r,δ⟩", "2nd", "ΔL_r", "⟨f,δ⟩", "2nd", "ΔL_f", "ahead")
    retain_keys = ("retain_first_order", "retain_second_order", "retain_change")
    keys = (*retain_keys, "forget_first_order", "forget_second_order", "forget_gain")
    rows = []
    for row in document["at_rho"]:
        for name, label in (("standard", "std"), ("neutral", "rosu")):
            ahead = MISSING if row["advantage_share"] is None else f"{row['advantage_share']:.0%}"
            last = ahead if name == "neutral" else ""
            rows.append((f"{row['rho']:g}", label, *(_number(row[name][key]) for key in keys), last))
    note = (
        "Means over pairs. std: standard perturbation ρf/‖f‖; rosu: retain-neutral one ρq/‖q‖. ΔL: measured, first "
        "order ⟨·,δ⟩ plus second-order part (2nd). ahead: pairs with L_r(w+δ_std) > L_r(w+δ_rosu)."
    )
    return Sheet("Both perturbations: retain change and forget gain", columns, tuple(rows), note)


def _radius(document: Mapping[str, Any]) -> Sheet:
    radius, curvature = document["radius"], document["curvature"]
    beyond = f"> {radius['max_rho']:g}" if (document["coupling"]["cosine"]["mean"] or 0.0) > 0.0 else MISSING
    rows = [
        ("uᵀ∇²L_r u along the standard perturbation", *_stat(curvature["standard"])),
        ("uᵀ∇²L_r u along the retain-neutral one", *_stat(curvature["neutral"])),
        ("M_r, the largest 2·|2nd order|/ρ² along both", *_stat(curvature["bound"])),
        ("ρ*: guaranteed, cos θ > M_r ρ/‖r‖ ends", *_stat(radius["guaranteed"])),
        ("ρ at which the measured losses cross", *_stat(radius["crossing"])),
        (
            "ρ at which their means cross",
            MISSING,
            beyond if radius["mean_crossing"] is None else _number(radius["mean_crossing"]),
            MISSING,
        ),
    ]
    crossed = radius["crossed_share"]
    note = "No pair has cos θ > 0: there is no first-order advantage that curvature could eat."
    if crossed is not None:
        note = (
            f"Over pairs with cos θ > 0, of which {crossed:.0%} cross up to ρ = {radius['max_rho']:g}; a ρ* beyond it "
            "is extrapolated."
        )
    return Sheet("How far the advantage reaches", ("", "5 %", "median", "95 %"), tuple(rows), note)


def _stat(found: Mapping[str, Any]) -> tuple[str, str, str]:
    return _number(found["q05"]), _number(found["median"]), _number(found["q95"])


def _parts(title: str, rows: Sequence[Mapping[str, Any]], label: str) -> Sheet:
    columns = (label, "parameters", "cos θ", "std", "in cos θ", "of ‖f‖²", "of ‖r‖²")
    keys = ("cosine", "cosine_std", "contribution", "forget_share", "retain_share")
    shown = [(part_name(row), f"{row['parameters']:,}", *(_fixed(row[key]) for key in keys)) for row in rows]
    note = "in cos θ: contribution ⟨f,r⟩_part/(‖f‖‖r‖); over all parts they add up to cos θ. of ‖·‖²: share."
    return Sheet(title, columns, tuple(shown), note)


def part_name(row: Mapping[str, Any]) -> str:
    """``layer 3 · q``, ``q`` or ``layer 3``."""
    layer = None if row["layer"] is None else f"layer {row['layer']}"
    return " · ".join(word for word in (layer, row["kind"]) if word) or "outside the layers"


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3g}"


def _fixed(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


def markdown(document: Mapping[str, Any], figures: Sequence[str] = ()) -> str:
    """The whole diagnosis as a page."""
    setup, settings = document["setup"], document["settings"]
    lines = [
        "# Coupling diagnosis",
        "",
        f"**{document['advice']['text']}**",
        "",
        f"Model {setup['model'] or 'in memory'}, {setup['parameters']:,} trainable parameters, {setup['layout']} on "
        f"{setup['processes']} process{'es' if setup['processes'] > 1 else ''}; {setup['forget_samples']} samples to "
        f"forget, {setup['retain_samples']} to keep; forget loss {settings['forget_loss']}, retain loss "
        f"{settings['retain_loss']}; seed {settings['seed']}. No weight was changed.",
        "",
    ]
    lines += [f"- pair {entry['pair']} left out: {entry['reason']}" for entry in document["skipped"]]
    lines += [f"![{name}]({name})" for name in figures]
    for sheet in sheets(document, whole=True):
        lines += ["", f"## {sheet.title}", "", "| " + " | ".join(sheet.columns) + " |"]
        lines.append("|---|" + "---:|" * (len(sheet.columns) - 1))
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in sheet.rows]
        lines += ["", sheet.note]
    return "\n".join([*lines, ""])


def print_diagnosis(document: Mapping[str, Any]) -> None:
    """Tables and advice on the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for sheet in sheets(document, whole=False):
        table = Table(
            title=sheet.title, caption=sheet.note, title_justify="left", caption_justify="left", padding=(0, 0, 0, 1)
        )
        for at, column in enumerate(sheet.columns):
            table.add_column(column, justify="left" if at == 0 else "right", no_wrap=at == 0)
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)
    for entry in document["skipped"]:
        console.print(f"pair {entry['pair']} left out: {entry['reason']}", markup=False)
    console.print(document["advice"]["text"], style="bold", highlight=False, markup=False)
