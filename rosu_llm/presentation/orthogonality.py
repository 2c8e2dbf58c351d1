"""The orthogonality audit as violins in the style of the paper's figure, and as a markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .plots import pyplot, save_figure

_COLOR = "#4c78a8"


def pipe_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table whose first column is text and whose others are numbers."""
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "---:|" * (len(headings) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])


def violins(result: Mapping[str, Any], path: Path) -> None:
    """Left: the distribution of ε_orth per retain batch size. Right: its median under the median bound."""
    plt = pyplot()
    shown = [cell for cell in result["cells"] if cell["used"]]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.6, 3.7), layout="constrained", gridspec_kw={"width_ratios": (1.75, 1)}
    )
    places = range(len(shown))
    if shown:
        # A density needs values that differ; where all are equal only the sticks are drawn.
        drawn = [i for i, cell in enumerate(shown) if cell["eps_orth"]["max"] > cell["eps_orth"]["min"]]
        if drawn:
            bodies = left.violinplot(
                [shown[i]["samples"]["eps_orth"] for i in drawn], positions=drawn, widths=0.85, showextrema=False
            )["bodies"]
            for body in bodies:
                body.set(facecolor=_COLOR, edgecolor=_COLOR, alpha=0.45)
        for i, cell in enumerate(shown):
            found = cell["eps_orth"]
            left.vlines(i, found["p5"], found["p95"], color="0.15", linewidth=1.0, zorder=3)
            left.vlines(i, found["p25"], found["p75"], color="0.15", linewidth=5.0, zorder=3)
            left.scatter(i, found["median"], s=14, color="white", edgecolor="0.15", linewidth=0.6, zorder=4)
    sizes = [cell["retain_batch_size"] for cell in shown]
    left.set_xticks(list(places), [str(size) for size in sizes])
    left.set_ylim(bottom=0.0)
    left.set_ylabel(r"$\varepsilon_{\mathrm{orth}} = |\cos(g_r^{\mathrm{full}}, u_\perp^{\mathrm{mini}})|$")
    left.set_title(f"{result['pairs']} pairs each, forget batch {result['forget_batch_size']}", fontsize=10)
    for key, label, style in (
        ("bound", r"bound $\|g^{\mathrm{full}}-g^{\mathrm{mini}}\|/\|g^{\mathrm{full}}\|$", "--"),
        ("eps_orth", r"$\varepsilon_{\mathrm{orth}}$", "-"),
    ):
        values = [cell[key] for cell in shown]
        color = "0.35" if key == "bound" else _COLOR
        right.plot(sizes, [v["median"] for v in values], style, color=color, marker="o", markersize=4, label=label)
        low, high = ([v[name] for v in values] for name in ("p5", "p95"))
        right.fill_between(sizes, low, high, color=color, alpha=0.15, linewidth=0)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    ticks = sizes if len(sizes) < 8 else sizes[::2]
    right.set_xticks(ticks, [str(size) for size in ticks])
    right.minorticks_off()
    right.set_title("median, 5–95 %", fontsize=10)
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.set_xlabel(r"retain batch size $|B_r|$")
        axes.grid(alpha=0.25)
    save_figure(figure, path)


def orthogonality_markdown(result: Mapping[str, Any]) -> str:
    """What was audited, the table, and what stands out."""
    rows = []
    for cell in result["cells"]:
        error, bound = cell["eps_orth"], cell["bound"]
        figures = ["–"] * 5
        if error is not None:
            figures = [f"{error['median']:.4f}", f"{error['p25']:.4f} – {error['p75']:.4f}"]
            figures += [f"{error['p5']:.4f} – {error['p95']:.4f}", f"{error['max']:.4f}", f"{bound['median']:.4f}"]
        counts = [str(cell["violations"]), str(sum(cell["degenerate"].values()))]
        rows.append([str(cell["retain_batch_size"]), *figures, *counts])
    headings = ("\\|B_r\\|", "median ε_orth", "25–75 %", "5–95 %", "max", "median bound", "above bound", "degenerate")
    config = result["config"]
    lines = [
        "# Full-retain orthogonality audit",
        "",
        f"{result['pairs']} mini-batch pairs per retain batch size, forget batch {result['forget_batch_size']}, at "
        f"`{result['model']}` as loaded ({result['parameters']:,} trainable parameters). Forget set: "
        f"{config['forget_data']}, {result['forget_samples']} samples; retain set: {config['retain_data']}, "
        f"{result['retain_samples']} samples; ‖g_full‖ = {result['full_gradient_norm']:.4g}; seed {result['seed']}.",
        "",
        pipe_table(headings, rows),
        "ε_orth = |cos(g_full, u_mini)| is 0 where a direction that is neutral for the mini-batch is neutral for the "
        "whole retain set; its bound is ‖g_full − g_mini‖/‖g_full‖. Degenerate pairs (no retain gradient, or no "
        "retain-orthogonal component) are left out.",
        *(f"\n{note}" for note in result["notes"]),
        "",
    ]
    return "\n".join(lines)
