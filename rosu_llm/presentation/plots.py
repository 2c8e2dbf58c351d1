"""Figures, drawn with matplotlib (extra ``plots``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import RosuError


class PlotsUnavailableError(RosuError, ImportError):
    """matplotlib is not installed."""


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files only."""
    try:
        import matplotlib
    except ImportError as error:
        raise PlotsUnavailableError("Plots need matplotlib: pip install 'rosu-llm[plots]'.") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


_MARKERS = {"before": "X", "retain_only": "*"}


def frontier(
    rows: Sequence[Mapping[str, Any]],
    labels: Mapping[str, str],
    path: Path,
    *,
    x: str = "forget_em",
    y: str = "retain_em",
    titles: tuple[str, str] = ("forget set: answer tokens reproduced", "retain set: answer tokens reproduced"),
) -> None:
    """What is still known of the forgotten against what is kept; the gold model's level is the dotted line."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    gold = next((row for row in rows if row["method"] == "retain_only"), None)
    if gold is not None:
        axes.axvline(gold[x], color="0.6", linestyle=":", linewidth=1.2, zorder=0)
    for i, row in enumerate(rows):
        name = str(row["method"])
        axes.scatter(
            row[x],
            row[y],
            s={"retain_only": 420, "before": 170}.get(name, 95),
            marker=_MARKERS.get(name, "o"),
            color="black" if name == "before" else ("goldenrod" if name == "retain_only" else f"C{i - 2}"),
            edgecolor="white",
            linewidth=0.8,
            label=labels.get(name, name),
            zorder=2 if name == "retain_only" else 3,
        )
    axes.set_xlabel(f"{titles[0]}  (goal: the dotted line)")
    axes.set_ylabel(f"{titles[1]}  (higher is better)")
    axes.grid(alpha=0.25)
    axes.margins(0.08)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    save_figure(figure, path)


def coupling_over_steps(
    logs: Mapping[str, Sequence[Mapping[str, float]]], labels: Mapping[str, str], path: Path
) -> None:
    """cos θ between forget and retain gradients, and both losses, along each run."""
    plt = pyplot()
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7.2, 5.6), sharex=True, layout="constrained")
    for i, (name, entries) in enumerate(logs.items()):
        steps = [e["step"] for e in entries]
        top.plot(steps, [e.get("coupling/cosine", float("nan")) for e in entries], color=f"C{i}", linewidth=1.4)
        bottom.plot(
            steps, [e["loss/retain"] for e in entries], color=f"C{i}", linewidth=1.4, label=labels.get(name, name)
        )
    top.axhline(0.0, color="0.6", linewidth=0.8, zorder=0)
    top.set_ylabel(r"coupling $\cos\theta$")
    bottom.set_ylabel("retain loss of the batch")
    bottom.set_yscale("log")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
    figure.legend(loc="outside right center", frameon=False)
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure beside ``path``, rename, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    figure.savefig(partial, dpi=150, format=path.suffix.lstrip("."))
    pyplot().close(figure)
    partial.replace(path)
