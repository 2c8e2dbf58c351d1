"""The coupling that was measured before training (``diagnosis.json``)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from .blocks import Block, Figure, Grid, Section, Text, shown
from .figures import style
from .other_verbs import Content, section
from .run import DIAGNOSIS, Run

_QUANTITIES = {
    "cosine": "cos θ",
    "forget_norm": "‖f‖",
    "retain_square": "‖r‖²",
    "q_norm": "‖q‖",
    "tau_residue": "τ/(‖r‖²+τ)",
    "forget_loss": "forget loss",
    "retain_loss": "retain loss",
}
_STATISTICS = ("mean", "std", "min", "median", "max")


def diagnosis(runs: Sequence[Run]) -> Section:
    """Advice, quantities over pairs, cos θ, and the retain loss along both perturbations."""
    hint = "No diagnosis.json: rosu diagnose --out RUN measures the coupling without changing a weight."
    return section("diagnosis", "Coupling diagnosis", runs, {DIAGNOSIS: _blocks}, {DIAGNOSIS: hint})


def _blocks(label: str, key: str, content: Content) -> list[Block]:
    coupling = content["coupling"]
    rows = tuple(
        (name, *(shown((coupling[field] or {}).get(statistic)) for statistic in _STATISTICS))
        for field, name in _QUANTITIES.items()
    )
    pairs = content["pairs_used"]
    return [
        Text(f"{label}: {content['advice']['text']}"),
        Grid(f"{label}: over {pairs} mini-batch pairs", ("quantity", *_STATISTICS), rows),
        _cosines(label, key, coupling["histogram"], pairs),
        _segments(label, key, content["segments"]),
        *_layers(label, key, content["by_layer"]),
    ]


def _cosines(label: str, key: str, histogram: Content, pairs: int) -> Figure:
    edges, counts = list(map(float, histogram["edges"])), list(map(int, histogram["counts"]))
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    widths = [b - a for a, b in pairwise(edges)]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.bar(middles, counts, width=widths, color="C0", edgecolor="none")
        axes.set_xlabel("cos θ between forget and retain gradient")
        axes.set_ylabel("mini-batch pairs")

    spans = (f"{shown(a, 3)} … {shown(b, 3)}" for a, b in pairwise(edges))
    rows = tuple((span, str(count)) for span, count in zip(spans, counts, strict=True))
    title = f"Coupling over mini-batch pairs: {label}"
    alt = f"Histogram of cos θ over {pairs} pairs."
    return Figure(f"{key}_cosine", title, alt, draw, Grid(title, ("cos θ", "pairs"), rows), f"{title}.")


def _segments(label: str, key: str, content: Content) -> Figure:
    rho = list(map(float, content["rho"]))
    lines = {"standard": "standard δ = ρ f/‖f‖", "neutral": "retain-neutral δ = ρ q/‖q‖"}
    curves = {name: list(map(float, content[name]["retain_change"])) for name in lines}
    tangents = {name: list(map(float, content[name]["retain_first_order"])) for name in lines}

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for at, name in enumerate(lines):
            axes.plot(rho, curves[name], label=lines[name], **style(at))
            axes.plot(rho, tangents[name], color=f"C{at}", linewidth=0.9, linestyle=(0, (1, 3)))
        axes.set_xlabel("ρ")
        axes.set_ylabel("change of the retain loss")
        figure.legend(loc="outside lower center", ncols=1)

    rows = tuple(tuple(map(shown, values)) for values in zip(rho, *curves.values(), *tangents.values(), strict=True))
    columns = ("ρ", "standard", "retain-neutral", "standard, first order", "retain-neutral, first order")
    title = f"Retain loss along both perturbations: {label}"
    ends = f"at ρ = {shown(rho[-1])}: standard {shown(curves['standard'][-1])}, neutral {shown(curves['neutral'][-1])}"
    caption = f"{title}. Dotted: what first order predicts."
    return Figure(f"{key}_segments", title, f"{title}, {ends}.", draw, Grid(title, columns, rows), caption)


def _layers(label: str, key: str, parts: Sequence[Content]) -> list[Block]:
    rows = [("outside" if p["layer"] is None else str(p["layer"]), p["contribution"], p["cosine"]) for p in parts]
    if not rows:
        return []
    names, heights = [row[0] for row in rows], [float(row[1] or 0.0) for row in rows]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.bar(range(len(names)), heights, color="C0")
        step = -(-len(names) // 12)
        axes.set_xticks(range(0, len(names), step), names[::step])
        axes.set_xlabel("layer")
        axes.set_ylabel("contribution to cos θ")

    title = f"Coupling by layer: {label}"
    data = Grid(title, ("layer", "contribution", "cos θ within it"), tuple((n, shown(c), shown(k)) for n, c, k in rows))
    caption = f"{title}. The bars add up to the mean cos θ."
    return [Figure(f"{key}_layers", title, f"{title}, {len(rows)} bars.", draw, data, caption)]
