"""Sensitivity as line plots with the paper's values beside, and as markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

from ..analysis.sensitivity import AXES, CLOUD, PAPER_LABEL
from .ablation_plots import is_log, widened
from .orthogonality import pipe_table
from .plots import pyplot, save_figure

_REFERENCES = ({"color": "0.35", "linestyle": "--"}, {"color": "goldenrod", "linestyle": ":"})


def axis_plot(document: Mapping[str, Any], name: str, path: Path) -> None:
    """A panel for each measure along one axis."""
    plt = pyplot()
    measures: Sequence[str] = document["measures"]
    figure, row = plt.subplots(
        1, len(measures), figsize=(2.6 * len(measures) + 0.4, 3.3), layout="constrained", squeeze=False
    )
    for axes, measure in zip(row[0], measures, strict=True):
        for i, line in enumerate(document["axes"][name]):
            _line(axes, line, measure, f"C{i}")
        paper = [point for point in document["paper"].get(name, []) if measure in point]
        if paper:
            axes.plot(
                *([point[key] for point in paper] for key in ("x", measure)),
                **{"color": "0.45", "linestyle": "-.", "marker": "s", "markersize": 3, "linewidth": 1.1},
                label=PAPER_LABEL,
            )
        for style, (label, values) in zip(_REFERENCES, document["references"].items(), strict=False):
            if measure in values:
                axes.axhline(values[measure], linewidth=1.2, label=label, zorder=1, **style)
        places = sorted({point["x"] for line in document["axes"][name] for point in [*line["points"], *paper]})
        if is_log(places):
            axes.set_xscale("log", base=2)
        if len(places) <= 8:
            axes.set_xticks(places, [f"{place:g}" for place in places], fontsize=8)
            axes.minorticks_off()
        axes.set_ylim(*widened(*axes.get_ylim()))
        axes.set_title(document["headings"][measure], fontsize=10)
        axes.set_xlabel(AXES[name].label, fontsize=9)
        axes.grid(alpha=0.25)
    handles, labels = row[0][0].get_legend_handles_labels()
    if any(labels):
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    save_figure(figure, path)


def _line(axes: Any, line: Mapping[str, Any], measure: str, color: str) -> None:
    points = [point for point in line["points"] if measure in point["mean"]]
    label = line["line"] or "this task"
    if line["line"] == CLOUD:
        pairs = [(point["x"], value) for point in points for value in point["values"][measure]]
        axes.scatter(*zip(*pairs, strict=True), s=16, color=color, alpha=0.7, label=label)
        return
    x, y = ([point["x"] for point in points], [point["mean"][measure] for point in points])
    axes.plot(x, y, color=color, marker="o", markersize=4, linewidth=1.4, label=label, zorder=3)
    spread = [point["spread"][measure] or 0.0 for point in points]
    if any(spread):
        low, high = ([m + sign * s for m, s in zip(y, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)


def trajectory_plot(document: Mapping[str, Any], path: Path) -> None:
    """Retain and forget loss along the runs, a colour for each retain batch size."""
    plt = pyplot()
    figure, row = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
    sizes = sorted({run["x"] for run in document["trajectories"]})
    colors = plt.get_cmap("viridis")
    for axes, part in zip(row, ("retain", "forget"), strict=True):
        shown: set[float] = set()
        for run in document["trajectories"]:
            color = colors(0.9 * sizes.index(run["x"]) / max(1, len(sizes) - 1))
            values = [nan if v is None else v for v in run[f"loss/{part}"]]
            label = None if run["x"] in shown else f"{run['x']:g}"
            shown.add(run["x"])
            axes.plot(
                run["step"], values, color=color, marker=".", markersize=3, linewidth=1.3, alpha=0.85, label=label
            )
        axes.set_xlabel("step")
        axes.set_ylabel(f"{part} loss of the batch")
        axes.grid(alpha=0.25)
    row[1].legend(title="$|B_r|$", frameon=False, fontsize=8)
    save_figure(figure, path)


def sensitivity_markdown(document: Mapping[str, Any]) -> str:
    """A table for each axis, and what is missing."""
    measures = document["measures"]
    lines = ["# Sensitivity", ""]
    for name, found in document["axes"].items():
        rows = []
        for line in found:
            for point in line["points"]:
                rows.append([f"{point['x']:g}", line["line"] or "this task", *_figures(point, measures)])
        for point in document["paper"].get(name, []):
            rows.append(
                [f"{point['x']:g}", PAPER_LABEL, *(f"{point[m]:.2f}" if m in point else "–" for m in measures), "–"]
            )
        headings = (AXES[name].label.replace("|", "\\|"), "", *(document["headings"][m] for m in measures), "runs")
        lines += [f"## Over {AXES[name].label.replace('|', chr(92) + '|')}", "", pipe_table(headings, rows)]
    if document["paper"]:
        lines.append(f"Rows '{PAPER_LABEL}' are the paper's own (its table on ρ), not runs of ours.")
    if any(point["count"] > 1 for found in document["axes"].values() for line in found for point in line["points"]):
        lines.append("Figures are means ± standard deviation (n − 1) over the runs of a row.")
    return "\n".join([*lines, *(f"\n{note}" for note in document["notes"]), ""])


def _figures(point: Mapping[str, Any], measures: Sequence[str]) -> list[str]:
    shown = []
    for measure in measures:
        text = f"{point['mean'][measure]:.3f}" if measure in point["mean"] else "–"
        spread = point["spread"].get(measure)
        shown.append(text if spread is None else f"{text} ± {spread:.3f}")
    return [*shown, str(point["count"])]
