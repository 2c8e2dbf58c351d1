"""The safeguard audit as histograms with the thresholds, runs overlaid, and as a markdown table."""

from __future__ import annotations

from collections.abc import Mapping
from math import log10
from pathlib import Path
from typing import Any

from .orthogonality import pipe_table
from .plots import pyplot, save_figure

_PANELS = (
    ("retain_sq", r"retain gradient $\|g_r\|^2$", r"$\tau$", "tau"),
    ("q", r"direction $\|q_\tau\|$", r"$\varepsilon_q$", "eps_q"),
)


def histograms(document: Mapping[str, Any], path: Path) -> None:
    """One panel for each quantity, on a logarithmic axis that reaches down to its threshold."""
    import numpy as np

    plt = pyplot()
    figure, rows = plt.subplots(2, 1, figsize=(7.6, 5.4), layout="constrained")
    for axes, (key, name, symbol, threshold) in zip(rows, _PANELS, strict=True):
        found = {i: run[key]["values"] for i, run in enumerate(document["runs"]) if run[key] is not None}
        shown = {i: [value for value in values if value > 0.0] for i, values in found.items()}
        limits = sorted({run[threshold] for run in document["runs"] if run["tau_mode"] == "absolute" or key == "q"})
        marks = [log10(value) for value in limits if value > 0.0]
        every = [log10(value) for values in shown.values() for value in values]
        axes.set_xscale("log")
        if every:
            low, high = min(every) - 0.05, max(every) + 0.05
            # The same bins for all runs, a twentieth of a decade wide or more.
            bins = np.logspace(low, high, 1 + min(60, max(1, round((high - low) / 0.05))))
            for i, values in shown.items():
                zeros = len(found[i]) - len(values)
                label = document["runs"][i]["run"] + (f" ({zeros} at 0, not shown)" if zeros else "")
                axes.hist(values, bins=bins, color=f"C{i}", alpha=0.5, label=label)
            marks += [low, high]
        else:
            axes.text(0.5, 0.5, "not in the logs", transform=axes.transAxes, ha="center", color="0.4")
        if marks:
            axes.set_xlim(10 ** (min(marks) - 0.5), 10 ** (max(marks) + 0.5))
        for value in limits:
            if value > 0.0:
                axes.axvline(value, color="crimson", linestyle="--", linewidth=1.4, label=f"{symbol} = {value:g}")
        axes.set_xlabel(name)
        axes.set_ylabel("logged steps")
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, fontsize=8, loc="upper center")
    save_figure(figure, path)


def safeguards_markdown(document: Mapping[str, Any]) -> str:
    """A row for each run and quantity, and below what is missing."""
    rows, notes = [], []
    for run in document["runs"]:
        for key, symbol, threshold in (("retain_sq", "‖r‖²", "τ"), ("q", "‖q‖", "ε_q")):
            rows.append([run["run"], symbol, *_figures(run[key], threshold), _fallbacks(run)])
        notes += [f"- {run['run']}: {note}" for note in run["notes"]]
    headings = ("run", "quantity", "min", "median", "max", "threshold", "logs at or below", "fallbacks")
    lines = ["# Safeguard audit", "", pipe_table(headings, rows), *notes, *document["notes"]]
    return "\n".join([*lines, ""])


def _figures(found: Mapping[str, Any] | None, symbol: str) -> list[str]:
    if found is None:
        return ["–"] * 5
    least = f"{found['min']:.3g}" + ("" if found["minimum_exact"] else " (of means)")
    limit = "–" if found["threshold"] is None else f"{symbol} = {found['threshold']:g}"
    return [least, f"{found['median']:.3g}", f"{found['max']:.3g}", limit, f"{found['below']} of {found['count']}"]


def _fallbacks(run: Mapping[str, Any]) -> str:
    if run["fallbacks"] is None:
        return "–"
    return ("" if run["fallbacks_exact"] else "≈ ") + f"{run['fallbacks']} in {run['steps'] or '?'} steps"
