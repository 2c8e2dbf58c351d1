"""The three audits as tables and figures: full-retain orthogonality, safeguards, sensitivity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10, nan
from typing import Any

from ..analysis.orthogonality.audit import OrthogonalityDocument
from ..analysis.safeguards import SafeguardsDocument
from ..analysis.sensitivity import AXES, CLOUD, PAPER_LABEL, SensitivityDocument
from .blocks import MISSING, Block, Figure, Row, Section, Table, TableCell, Text, shown, text_table
from .charts import Panel, Series, along
from .curves import FORGET_LOSS, RETAIN_LOSS, Curve, Quantity, curves_figure
from .drawing import legend, short, style, thin

_MEANING = (
    "ε_orth = |cos(g_full, u_mini)| is 0 where a direction that is neutral for the mini-batch is neutral for the whole "
    "retain set; its bound is ‖g_full − g_mini‖/‖g_full‖. Degenerate pairs (no retain gradient, or no "
    "retain-orthogonal component) are left out."
)
#: Quantity of the safeguard audit → its symbol, the symbol and the name of its threshold.
_SAFEGUARDS = {"retain_sq": ("‖r‖²", "τ", "tau"), "q": ("‖q‖", "ε_q", "eps_q")}


def orthogonality_section(document: OrthogonalityDocument, *, brief: bool = False) -> Section:
    """What was audited, the figure, the table, and what stands out; ``brief`` leaves out the setup."""
    cells: Sequence[Mapping[str, Any]] = document["cells"]
    broken, used = (sum(cell[key] for cell in cells) for key in ("violations", "used"))
    said = f"{document['model']}: the bound was broken by {broken} of {used} pairs."
    if not brief:
        config = document["config"]
        said = (
            f"{document['pairs']} mini-batch pairs per retain batch size, forget batch {document['forget_batch_size']},"
            f" at `{document['model']}` as loaded ({document['parameters']:,} trainable parameters). Forget set: "
            f"{config['forget_data']}, {document['forget_samples']} samples; retain set: {config['retain_data']}, "
            f"{document['retain_samples']} samples; ‖g_full‖ = {document['full_gradient_norm']:.4g}; "
            f"seed {document['seed']}."
        )
    rows = []
    for cell in cells:
        error, bound = cell["eps_orth"], cell["bound"]
        figures = [MISSING] * 5
        if error is not None:
            figures = [f"{error['median']:.4f}", f"{error['p25']:.4f} – {error['p75']:.4f}"]
            figures += [f"{error['p5']:.4f} – {error['p95']:.4f}", f"{error['max']:.4f}", f"{bound['median']:.4f}"]
        counts = [str(cell["violations"]), str(sum(cell["degenerate"].values()))]
        rows.append((str(cell["retain_batch_size"]), *figures, *counts))
    columns = ("|B_r|", "median ε_orth", "25–75 %", "5–95 %", "max", "median bound", "above bound", "degenerate")
    table = text_table("ε_orth by retain batch size", columns, rows, notes=(_MEANING, *map(str, document["notes"])))
    title = "Full-retain orthogonality audit"
    return Section("orthogonality", title, [Text(said), violins(document, table), table])


def violins(document: OrthogonalityDocument, table: Table) -> Figure:
    """Above: the distribution of ε_orth per retain batch size. Below: its median under the median bound."""
    used: list[Mapping[str, Any]] = [cell for cell in document["cells"] if cell["used"]]
    sizes = [cell["retain_batch_size"] for cell in used]

    def draw(figure: Any) -> None:
        above, below = figure.subplots(2, 1)
        # A density needs values that differ; where all are equal only the box is drawn.
        spread = [at for at, cell in enumerate(used) if cell["eps_orth"]["max"] > cell["eps_orth"]["min"]]
        if spread:
            samples = [used[at]["samples"]["eps_orth"] for at in spread]
            for body in above.violinplot(samples, positions=spread, widths=0.85, showextrema=False)["bodies"]:
                body.set(facecolor="C0", edgecolor="C0", alpha=0.45)
        for at, cell in enumerate(used):
            found = cell["eps_orth"]
            above.vlines(at, found["p5"], found["p95"], color="0.4", linewidth=1.0, zorder=3)
            above.vlines(at, found["p25"], found["p75"], color="0.4", linewidth=5.0, zorder=3)
            above.scatter(at, found["median"], s=14, color="white", edgecolor="0.4", linewidth=0.6, zorder=4)
        above.set_xticks(range(len(sizes)), map(str, sizes))
        above.set(ylim=(0.0, None), ylabel="ε_orth")
        for key, label, look, color in (("bound", "bound", "--", "C1"), ("eps_orth", "ε_orth", "-", "C0")):
            low, middle, high = ([cell[key][name] for cell in used] for name in ("p5", "median", "p95"))
            below.plot(sizes, middle, look, color=color, marker="o", markersize=4, label=f"median {label}")
            below.fill_between(sizes, low, high, color=color, alpha=0.15, linewidth=0)
        below.set_xscale("log", base=2)
        ticks = sizes if len(sizes) < 8 else sizes[::2]
        below.set_xticks(ticks, map(str, ticks))
        below.set(yscale="log", xlabel="retain batch size |B_r|")
        below.minorticks_off()
        legend(figure, below)

    medians = ", ".join(f"{cell['eps_orth']['median']:.3g} at {cell['retain_batch_size']}" for cell in used)
    title = "Full-retain orthogonality"
    caption = f"{title}: ε_orth of {document['pairs']} mini-batch pairs each; bands from 5 to 95 %."
    alt = f"ε_orth by retain batch size: medians {medians or 'unknown'}."
    return Figure("audit_orthogonality", title, alt, draw, table, caption, (5.0, 5.2))


def safeguards_section(document: SafeguardsDocument) -> Section:
    """A row for each run and quantity, what is missing, and a figure for both quantities."""
    runs: Sequence[Mapping[str, Any]] = document["runs"]
    rows, notes = [], []
    for run in runs:
        fallbacks = MISSING
        if run["fallbacks"] is not None:
            exact = "" if run["fallbacks_exact"] else "≈ "
            fallbacks = f"{exact}{run['fallbacks']} in {run['steps'] or '?'} steps"
        for key, (sign, symbol, _) in _SAFEGUARDS.items():
            figures, found = [MISSING] * 5, run[key]
            if found is not None:
                least = f"{found['min']:.3g}" + ("" if found["minimum_exact"] else " (of means)")
                limit = MISSING if found["threshold"] is None else f"{symbol} = {found['threshold']:g}"
                figures = [least, f"{found['median']:.3g}", f"{found['max']:.3g}", limit]
                figures.append(f"{found['below']} of {found['count']}")
            rows.append((run["run"], sign, *figures, fallbacks))
        notes += [f"{run['run']}: {note}" for note in run["notes"]]
    columns = ("run", "quantity", "min", "median", "max", "threshold", "logs at or below", "fallbacks")
    table = text_table("Safeguards", columns, rows, notes=(*notes, *map(str, document["notes"])))
    return Section("safeguards", "Safeguard audit", [table, histograms(document)])


def histograms(document: SafeguardsDocument) -> Figure:
    """For each quantity its distribution, on an axis that reaches down to the threshold, and its course."""
    runs: Sequence[Mapping[str, Any]] = document["runs"]
    #: Quantity → number of the run → (steps, values), the smallest of neighbouring steps.
    courses = {
        key: {
            at: thin(list(zip(run[key]["steps"], run[key]["values"], strict=True)), min)[:2]
            for at, run in enumerate(runs)
            if run[key]
        }
        for key in _SAFEGUARDS
    }

    def draw(figure: Any) -> None:
        grid = figure.subplots(2, 2)
        for (left, right), (key, (sign, symbol, name)) in zip(grid, _SAFEGUARDS.items(), strict=True):
            logged = {at: [value for value in runs[at][key]["values"] if value > 0.0] for at in courses[key]}
            limits = sorted({r[name] for r in runs if (r["tau_mode"] == "absolute" or key == "q") and r[name] > 0.0})
            _distribution(left, logged, limits)
            for at, (steps, values) in courses[key].items():
                zeros = len(runs[at][key]["values"]) - len(logged[at])
                label = short(runs[at]["run"]) + (f" ({zeros} {sign} at 0, not shown)" if zeros else "")
                right.plot(steps, [v if v > 0 else nan for v in values], label=label, **style(at))
            if any(logged.values()):
                right.set_yscale("log")
            for value in limits:
                look = {"color": "0.4", "linestyle": "--", "linewidth": 1.4, "label": f"{symbol} = {value:g}"}
                left.axvline(value, **look)
                right.axhline(value, **look)
            left.set(xlabel=sign, ylabel="logged steps")
            right.set(xlabel="step", ylabel=sign)
        legend(figure, *grid.flat)

    rows = [
        (run["run"], sign, shown(step), shown(value))
        for at, run in enumerate(runs)
        for key, (sign, _, _) in _SAFEGUARDS.items()
        for step, value in zip(*courses[key].get(at, ((), ())), strict=True)
    ]
    title = "Safeguards against their thresholds"
    data = text_table(title, ("run", "quantity", "step", "value"), rows)
    alt = f"‖r‖² and ‖q‖ of {len(runs)} runs: distribution and course (smallest of neighbouring steps)."
    return Figure("audit_safeguards", title, alt, draw, data, f"{title}.", (6.4, 5.2))


def _distribution(axes: Any, logged: Mapping[int, list[float]], limits: list[float]) -> None:
    import numpy as np

    every = [log10(value) for values in logged.values() for value in values]
    marks = [log10(value) for value in limits]
    axes.set_xscale("log")
    if every:
        low, high = min(every) - 0.05, max(every) + 0.05
        # The same bins for all runs, a twentieth of a decade wide or more.
        bins = np.logspace(low, high, 1 + min(60, max(1, round((high - low) / 0.05))))
        for at, values in logged.items():
            axes.hist(values, bins=bins, color=f"C{at}", alpha=0.5)
        marks += [low, high]
    else:
        axes.text(0.5, 0.5, "not in the logs", transform=axes.transAxes, ha="center", color="0.5")
    if marks:
        axes.set_xlim(10 ** (min(marks) - 0.5), 10 ** (max(marks) + 0.5))


def sensitivity_section(document: SensitivityDocument) -> Section:
    """A figure and a table for each axis, the losses along the runs, and what is missing."""
    blocks: list[Block] = []
    for name in document["axes"]:
        table = _table(document, name)
        blocks += [axis_figure(document, name, table), table]
    if document["trajectories"]:
        blocks.append(trajectories(document))
    if document["paper"]:
        blocks.append(Text(f"Rows '{PAPER_LABEL}' are the paper's own (its table on ρ), not runs of ours."))
    if any(point["count"] > 1 for found in document["axes"].values() for line in found for point in line["points"]):
        blocks.append(Text("Figures are means ± standard deviation (n − 1) over the runs of a row."))
    return Section("sensitivity", "Sensitivity", [*blocks, *(Text(str(note)) for note in document["notes"])])


def _table(document: SensitivityDocument, name: str) -> Table:
    measures, rows = document["measures"], []
    for line in document["axes"][name]:
        for point in line["points"]:
            cells = [TableCell(point["mean"].get(m), spread=point["spread"].get(m)) for m in measures]
            name_cell, count = TableCell(text=line["line"] or "this task"), TableCell(text=str(point["count"]))
            rows.append(Row(f"{point['x']:g}", (name_cell, *cells, count)))
    for paper in document["paper"].get(name, []):
        printed = [TableCell(text=f"{paper[m]:.2f}" if m in paper else None) for m in measures]
        rows.append(Row(f"{paper['x']:g}", (TableCell(text=PAPER_LABEL), *printed, TableCell())))
    columns = ("", *(document["headings"][m] for m in measures), "runs")
    label = AXES[name].label
    return Table(columns, tuple(rows), heading=label, caption=f"Over {label}", digits=3)


def axis_figure(document: SensitivityDocument, name: str, table: Table) -> Figure:
    """A panel for each measure along one axis."""
    panels = []
    for measure in document["measures"]:
        series = []
        for line in document["axes"][name]:
            points = [point for point in line["points"] if measure in point["mean"]]
            if line["line"] == CLOUD:
                cloud = [(point["x"], value, None) for point in points for value in point["values"][measure]]
                series.append(Series(CLOUD, cloud, "cloud"))
            else:
                known = [(point["x"], point["mean"][measure], point["spread"][measure]) for point in points]
                series.append(Series(line["line"] or "this task", known))
        printed = [(p["x"], p[measure], None) for p in document["paper"].get(name, []) if measure in p]
        series += [Series(PAPER_LABEL, printed, "paper")] if printed else []
        levels = {label: values[measure] for label, values in document["references"].items() if measure in values}
        panels.append(Panel(document["headings"][measure], series, levels))
    label = AXES[name].label
    return along(f"sensitivity_{name}", f"Sensitivity to {label}", label, panels, table)


def trajectories(document: SensitivityDocument) -> Figure:
    """Retain and forget loss along the runs, a colour for each retain batch size."""
    runs: Sequence[Mapping[str, Any]] = document["trajectories"]
    sizes = sorted({run["x"] for run in runs})
    panels: dict[Quantity, list[Curve]] = {RETAIN_LOSS: [], FORGET_LOSS: []}
    for quantity, curves in panels.items():
        for run in runs:
            losses = tuple(nan if value is None else float(value) for value in run[quantity.key])
            curves.append(Curve(tuple(run["step"]), losses, f"|B_r| = {run['x']:g}", sizes.index(run["x"])))
    return curves_figure("trajectories_retain_batch", "Losses along the runs by retain batch size", panels)
