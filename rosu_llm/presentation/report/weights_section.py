"""Weight change by layer and kind as a map per run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...analysis.coupling.parts import ORDER
from ...errors import RosuError
from .blocks import Block, Figure, Grid, Missing, Section, Text, shown
from .run import Run
from .weights import Change, find_base, weight_change

OUTSIDE = "outside layers"


def weights(runs: Sequence[Run], base: Path | None) -> Section:
    """Maps of ‖w − w₀‖/‖w₀‖ on one colour scale."""
    blocks: list[Block] = []
    changes: dict[int, Change] = {}
    if any(run.kind == "rosu demo" for run in runs):
        blocks.append(Missing("rosu demo keeps no weights."))
    for at, run in enumerate(runs):
        if run.kind in ("rosu demo", "rosu sweep"):
            continue
        found = _change(run, base)
        if isinstance(found, str):
            blocks.append(Missing(found))
        else:
            changes[at] = found
    moved = [value for change in changes.values() for value in change.parts.values() if value > 0]
    limits = (min(moved), max(moved)) if moved else (0.1, 1.0)
    if changes:
        blocks.insert(0, Text("‖w − w₀‖ / ‖w₀‖ against the model each run started from. Empty cells did not move."))
    blocks += [_figure(runs[at].label, at, change, limits) for at, change in changes.items()]
    return Section("weights", "Weight change", blocks or [Missing("No run has weights to compare.")])


def _change(run: Run, base: Path | None) -> Change | str:
    """The change, or why there is none."""
    if not any(run.folder.glob("*.safetensors")):
        return f"{run.label} holds no weights (*.safetensors)."
    start = base or find_base(run.base)
    if start is None:
        known = f"{run.base}, which is not on this machine" if run.base else "not recorded"
        return f"{run.label}: the model it started from is {known}. Pass --base FOLDER to compare."
    try:
        return weight_change(start, run.folder)
    except (RosuError, OSError, KeyError, ValueError) as error:
        return f"{run.label}: its weights cannot be compared with {start.name}. {error}"


def _figure(label: str, at: int, change: Change, limits: tuple[float, float]) -> Figure:
    layers = sorted({layer for layer, _ in change.parts if layer is not None})
    inside = _ordered({kind for layer, kind in change.parts if layer is not None})
    outside = _ordered({kind for layer, kind in change.parts if layer is None})

    def draw(figure: Any) -> None:
        import matplotlib.colors as colors
        import numpy as np

        axes = figure.subplots()
        # A model without numbered layers is one row of what it has.
        kinds, places = (inside, layers) if layers else (outside, [None])
        values = np.array([[change.parts.get((place, kind), 0.0) for kind in kinds] for place in places])
        low, high = limits
        scale = colors.LogNorm(low, high if high > low else low * 10)
        shades = axes.pcolormesh(np.ma.masked_less_equal(values, 0.0), cmap="viridis", norm=scale)
        axes.set_xticks(np.arange(len(kinds)) + 0.5, kinds, rotation=40, ha="right")
        step = math.ceil(len(places) / 16)
        axes.set_yticks(np.arange(len(places))[::step] + 0.5, [OUTSIDE if p is None else p for p in places[::step]])
        axes.set_ylabel("layer")
        axes.grid(False)
        figure.colorbar(shades, ax=axes, label="relative change")

    kinds = [*inside, *(kind for kind in outside if kind not in inside)]
    places = [*layers, None] if outside else layers
    rows = [(OUTSIDE if p is None else str(p), *(_cell(change, p, kind) for kind in kinds)) for p in places]
    largest = max(change.parts, key=lambda part: change.parts[part])
    where = f"{largest[1]}" + ("" if largest[0] is None else f" of layer {largest[0]}")
    most = shown(change.parts[largest], 3)
    data = Grid(f"Relative weight change: {label}", ("layer", *kinds), tuple(rows), notes=change.notes)
    text = f"{label}: all weights together moved by {shown(change.total, 3)}; most did {where} ({most})."
    size = (5.0, min(6.0, 2.2 + 0.12 * max(8, len(layers))))
    return Figure(f"weights_{at}", f"Weight change: {label}", text, draw, data, text, size)


def _cell(change: Change, layer: int | None, kind: str) -> str:
    return shown(change.parts.get((layer, kind)), 3)


def _ordered(kinds: set[str]) -> list[str]:
    return sorted(kinds, key=lambda kind: (ORDER.index(kind) if kind in ORDER else len(ORDER), kind))
