"""The frontier of a search: how much was forgotten against how much was kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..evaluation.aggregates import harmonic_mean
from ..experiments.sweep.collect import DONE
from ..experiments.sweep.task import SELECTED_BY
from .plots import pyplot, save_figure

_REFERENCES = {"initial": ("initial model", "X", "black"), "retain": ("retain model", "P", "goldenrod")}


def level_curve(level: float, x: Any) -> Any:
    """The y with HM(x, y) = ``level``: level · x / (2x − level), for x > level / 2."""
    return level * x / (2 * x - level)


def levels(across: tuple[float, float], up: tuple[float, float]) -> list[float]:
    """Round harmonic means whose curves cross the part of the plane that is shown, wherever that lies.

    HM grows in both directions, so the curves seen are those between its values at two corners.
    """
    from matplotlib.ticker import MaxNLocator

    low, high = (harmonic_mean(max(0.0, edge) for edge in corner) for corner in zip(across, up, strict=True))
    ticks = MaxNLocator(nbins=9, steps=[1, 2, 5, 10]).tick_values(low, high)
    return [float(tick) for tick in ticks if low < tick < high]


def frontier_plot(content: Mapping[str, Any], path: Path) -> None:
    """Mem against Util of the finished trials, on level curves of their harmonic mean."""
    import numpy as np

    plt = pyplot()
    done = {trial["number"]: trial["scores"] for trial in content["trials"] if trial["state"] == DONE}
    front = sorted((done[number]["Util"], done[number]["Mem"]) for number in content["pareto"])
    best = done[content["best"]]
    figure, axes = plt.subplots(figsize=(7.2, 4.8), layout="constrained")
    others = [scores for number, scores in done.items() if number not in content["pareto"]]
    dots = {"s": 42, "edgecolor": "white", "linewidth": 0.6}
    if others:
        axes.scatter(
            [s["Util"] for s in others], [s["Mem"] for s in others], color="0.6", label="trial", zorder=3, **dots
        )
    axes.plot(*zip(*front, strict=True), color="C0", linewidth=1.0, drawstyle="steps-pre", zorder=3)
    axes.scatter(*zip(*front, strict=True), color="C0", label="on the frontier", zorder=4, **dots)
    label = f"best: trial {content['best']}, {content['headings'][SELECTED_BY]} {best[SELECTED_BY]:.2f}"
    axes.scatter(best["Util"], best["Mem"], s=230, marker="*", color="C3", edgecolor="white", label=label, zorder=5)
    for name, entry in content["references"].items():
        scores = entry["scores"]
        if scores["Mem"] is not None and scores["Util"] is not None:
            text, marker, color = _REFERENCES[name]
            axes.scatter(
                scores["Util"], scores["Mem"], s=90, marker=marker, color=color, edgecolor="white", label=text, zorder=4
            )
    axes.margins(0.08)
    across, up = axes.get_xlim(), axes.get_ylim()
    for level in levels(across, up):
        x = np.linspace(max(across[0], level / 2 + 1e-3), across[1], 400)
        y = level_curve(level, x)
        seen = np.flatnonzero((y >= up[0]) & (y <= up[1]))
        axes.plot(x, y, color="0.8", linewidth=0.9, zorder=1)
        if len(seen):
            at = int(seen[-1])
            axes.annotate(f"{level:g}", (x[at], y[at]), color="0.5", fontsize=8, ha="right", va="bottom", zorder=2)
    axes.set_xlim(*across)
    axes.set_ylim(*up)
    axes.set_xlabel(f"{content['headings']['Util']}: what is kept")
    axes.set_ylabel(f"{content['headings']['Mem']}: what is forgotten")
    axes.set_title(f"Grey curves: equal {SELECTED_BY}", fontsize=10, color="0.35")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    save_figure(figure, path)
