"""Figures of a diagnosis: cos θ over pairs, over the model, and both losses along both perturbations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..analysis.coupling.parts import ORDER
from .plots import pyplot, save_figure

Document = Mapping[str, Any]

_COLOURS = {"standard": "C3", "neutral": "C0"}
_LABELS = {"standard": r"standard $\delta_{std}$", "neutral": r"retain-neutral $\delta_{rosu}$"}


def cosine_figure(document: Document, path: Path) -> bool:
    """Distribution of cos θ over pairs: histogram, every pair as a tick, mean as a line."""
    plt = pyplot()
    cosines = np.array([pair["cosine"] for pair in document["per_pair"]])
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    low, high = cosines.min(), cosines.max()
    margin = max(0.05, 0.15 * (high - low))
    axes.hist(cosines, bins=min(20, max(5, len(cosines) // 2)), color="C0", alpha=0.55, edgecolor="white")
    top = axes.get_ylim()[1]
    axes.plot(cosines, np.full(len(cosines), -0.04 * top), "|", color="0.25", markersize=9)
    axes.axvline(cosines.mean(), color="C3", linewidth=1.6, label=rf"mean $\cos\theta$ = {cosines.mean():.3f}")
    if low - margin < 0.0 < high + margin:
        axes.axvline(0.0, color="0.5", linewidth=0.9)
    axes.set_xlim(max(-1.02, low - margin), min(1.02, high + margin))
    axes.set_ylim(-0.1 * top, top)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(r"$\cos\theta$ between forget and retain gradient, one tick per pair")
    axes.set_ylabel("pairs")
    axes.legend(frameon=False)
    save_figure(figure, path)
    return True


def parts_figure(document: Document, path: Path) -> bool:
    """Heat map of cos θ, layers × kinds; parameters outside the layers are the last row."""
    plt = pyplot()
    rows = document["by_part"]
    kinds = sorted({row["kind"] for row in rows}, key=_kind_place)
    layers = sorted({row["layer"] for row in rows}, key=lambda layer: (layer is None, layer))
    values = np.full((len(layers), len(kinds)), np.nan)
    for row in rows:
        if row["cosine"] is not None:
            values[layers.index(row["layer"]), kinds.index(row["kind"])] = row["cosine"]
    size = (max(4.8, 1.6 + 0.62 * len(kinds)), max(2.4, 1.3 + 0.3 * len(layers)))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    axes.set_facecolor("0.93")
    image = axes.imshow(values, cmap="RdBu_r", vmin=-1.0, vmax=1.0, aspect="auto")
    if len(layers) <= 16:
        for (y, x), value in np.ndenumerate(values):
            if np.isfinite(value):
                shade = "white" if abs(value) > 0.7 else "black"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, color=shade)
    axes.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right")
    step = max(1, len(layers) // 24)
    shown = [i for i, layer in enumerate(layers) if layer is None or layer % step == 0]
    axes.set_yticks(shown, ["outside" if layers[i] is None else f"layer {layers[i]}" for i in shown])
    figure.colorbar(image, ax=axes, label=r"mean $\cos\theta$ of the part")
    save_figure(figure, path)
    return True


def _kind_place(kind: str) -> tuple[int, str]:
    stem = kind.partition(" ")[0]
    return (ORDER.index(stem) if stem in ORDER else len(ORDER), kind)


def segments_figure(document: Document, path: Path) -> bool:
    """L_r and L_f along both perturbations: mean and spread over pairs, first order dotted; none if all fell back."""
    segments = document["segments"]
    if not segments["standard"].get("retain_change"):
        return False
    plt = pyplot()
    rhos = np.array(segments["rho"])
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 3.9), layout="constrained")
    columns = (
        ("retain", "retain_change", "retain loss (lower is better)"),
        ("forget", "forget_gain", "forget loss (higher is better)"),
    )
    for axes, (loss, key, title) in zip(panels, columns, strict=True):
        reach: list[float] = []
        for name, colour in _COLOURS.items():
            curve = segments[name]
            mean = np.array(curve[key])
            spread = np.array([x or 0.0 for x in curve[f"{key}_std"]])
            axes.plot(rhos, mean, color=colour, marker="o", markersize=3, label=_LABELS[name])
            axes.fill_between(rhos, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
            reach += [*(mean - spread), *(mean + spread)]
            axes.plot(rhos, curve[f"{loss}_first_order"], color=colour, linestyle=":", linewidth=1.4)
        axes.plot([], [], color="0.4", linestyle=":", label="first order")
        axes.axvline(document["settings"]["rho"], color="0.7", linewidth=0.9, zorder=0)
        axes.axhline(0.0, color="0.7", linewidth=0.9, zorder=0)
        # What was measured sets the scale: first-order lines may run far out of it.
        room = 0.15 * ((max(reach) - min(reach)) or 1.0)
        axes.set_ylim(min(reach) - room, max(reach) + 2 * room)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(r"radius $\rho$")
        axes.set_ylabel("change of the loss")
        axes.grid(alpha=0.25)
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=3)
    save_figure(figure, path)
    return True


#: File name → what draws it; False where there is nothing to draw.
FIGURES: dict[str, Callable[[Document, Path], bool]] = {
    "diagnosis_cosine.png": cosine_figure,
    "diagnosis_parts.png": parts_figure,
    "diagnosis_segments.png": segments_figure,
}
