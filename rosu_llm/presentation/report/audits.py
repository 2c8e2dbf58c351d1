"""The audits: orthogonality to the full retain gradient, the numerical safeguards, sensitivity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .blocks import Block, Figure, Grid, Section, Text, shown
from .curves import thin
from .figures import dot, short, style
from .other_verbs import Content, section
from .run import ORTHOGONALITY, SAFEGUARDS, SENSITIVITY, Run

_HINTS = {
    ORTHOGONALITY: "No audit_orthogonality.json: rosu audit orthogonality measures it.",
    SAFEGUARDS: "No audit_safeguards.json: rosu audit safeguards RUN reads it off a run's log.",
    SENSITIVITY: "No audit_sensitivity.json: rosu audit sensitivity draws it from a sweep.",
}


def audits(runs: Sequence[Run]) -> Section:
    """One part per audit that was made."""
    builders = {ORTHOGONALITY: _orthogonality, SAFEGUARDS: _safeguards, SENSITIVITY: _sensitivity}
    return section("audits", "Audits", runs, builders, _HINTS)


def _orthogonality(label: str, key: str, content: Content) -> list[Block]:
    cells = [cell for cell in content["cells"] if cell["eps_orth"] is not None]
    sizes = [int(cell["retain_batch_size"]) for cell in cells]
    if not cells:
        return [Text(f"{label}: no pair of the orthogonality audit was usable.")]
    errors = [[float(v) for v in cell["samples"]["eps_orth"]] or [float(cell["eps_orth"]["median"])] for cell in cells]
    bounds = [float(cell["bound"]["median"]) for cell in cells]
    rows = tuple(
        (
            str(cell["retain_batch_size"]),
            f"{cell['used']}/{cell['pairs']}",
            *(shown(cell["eps_orth"][name], 3) for name in ("median", "p95", "max")),
            shown(cell["bound"]["median"], 3),
            str(cell["violations"]),
        )
        for cell in cells
    )

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        parts = axes.violinplot(errors, range(len(sizes)), widths=0.8, showmedians=True, showextrema=False)
        for body in parts["bodies"]:
            body.set(facecolor="C0", alpha=0.45)
        parts["cmedians"].set_color("C0")
        axes.plot(range(len(sizes)), bounds, label="median of the bound", marker="D", markersize=4, **style(1))
        axes.set_xticks(range(len(sizes)), map(str, sizes))
        axes.set_xlabel("retain batch size")
        axes.set_ylabel("ε_orth")
        axes.set_ylim(bottom=0.0)
        figure.legend(loc="outside lower center")

    columns = ("retain batch", "pairs used", "median ε_orth", "95 %", "largest", "median bound", "violations")
    title = f"Full-retain orthogonality: {label}"
    broken = sum(int(cell["violations"]) for cell in cells)
    text = f"{content['model']}: the bound was broken by {broken} of {sum(cell['used'] for cell in cells)} pairs."
    alt = f"ε_orth by retain batch size: medians {', '.join(row[2] for row in rows)} at {', '.join(map(str, sizes))}."
    grid = Grid(title, columns, rows, notes=tuple(map(str, content["notes"])))
    caption = f"{title}. ε_orth = |cos(full retain gradient, u)| of {content['pairs']} mini-batch pairs each."
    return [Text(text), Figure(f"{key}_orthogonality", title, alt, draw, grid, caption)]


def _safeguards(label: str, key: str, content: Content) -> list[Block]:
    rows = []
    for run in content["runs"]:
        lowest = [(run[name] or {}).get("min") for name in ("retain_sq", "q")]
        count = shown(run["fallbacks"]) + ("" if run["fallbacks_exact"] else " (at least)")
        guards = (lowest[0], run["tau"], lowest[1], run["eps_q"])
        rows.append((str(run["run"]), shown(run["logged"]), *map(shown, guards), count))
    columns = ("run", "log entries", "smallest ‖r‖²", "τ", "smallest ‖q‖", "ε_q", "fallbacks")
    notes = [str(note) for run in content["runs"] for note in run["notes"]] + list(map(str, content["notes"]))
    title = f"Safeguards: {label}"
    blocks: list[Block] = [Grid(title, columns, tuple(rows), notes=tuple(notes))]
    for name, sign, limit in (("retain_sq", "‖r‖²", "τ"), ("q", "‖q‖", "ε_q")):
        lines = [
            (str(run["run"]), *thin(list(zip(run[name]["steps"], run[name]["values"], strict=True)), min)[:2])
            for run in content["runs"]
            if run[name] and run[name]["values"]
        ]
        if lines:
            threshold = next((run[name]["threshold"] for run in content["runs"] if run[name]), None)
            blocks.append(_guarded(f"{key}_{name}", label, sign, limit, lines, threshold))
    return blocks


Line = tuple[str, tuple[float, ...], tuple[float, ...]]


def _guarded(key: str, label: str, sign: str, limit: str, lines: Sequence[Line], threshold: float | None) -> Figure:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for at, (name, steps, values) in enumerate(lines):
            axes.plot(steps, [value if value > 0 else float("nan") for value in values], label=short(name), **style(at))
        if threshold:
            axes.axhline(threshold, color="0.5", linestyle=":", label=limit)
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel(sign)
        figure.legend(loc="outside lower center", ncols=2)

    rows = tuple(
        (name, shown(step), shown(value))
        for name, steps, values in lines
        for step, value in zip(steps, values, strict=True)
    )
    title = f"{sign} against {limit}: {label}"
    alt = f"{sign} over the steps of {len(lines)} runs (smallest of neighbouring steps); {limit} is {shown(threshold)}."
    return Figure(key, title, alt, draw, Grid(title, ("run", "step", sign), rows), f"{title}.")


def _sensitivity(label: str, key: str, content: Content) -> list[Block]:
    blocks: list[Block] = []
    measures = list(map(str, content["measures"]))
    for axis, lines in content["axes"].items():
        points = [(line["line"], point) for line in lines for point in line["points"]]
        if not points:
            continue
        rows = tuple(
            (name or "all", shown(point["x"]), str(point["count"]), *(shown(point["mean"].get(m)) for m in measures))
            for name, point in points
        )
        title = f"Sensitivity to {axis}: {label}"
        grid = Grid(title, ("line", axis, "runs", *measures), rows, notes=tuple(map(str, content["notes"])))
        blocks.append(_sensitive(f"{key}_{axis}", title, axis, measures, [point for _, point in points], grid))
    return blocks or [Text(f"{label}: the sensitivity audit found nothing to compare.")]


def _sensitive(
    key: str, title: str, axis: str, measures: Sequence[str], points: Sequence[Content], grid: Grid
) -> Figure:
    found = {
        m: [(float(p["x"]), float(p["mean"][m])) for p in points if p["mean"].get(m) is not None] for m in measures
    }

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for at, (measure, values) in enumerate(found.items()):
            axes.scatter([x for x, _ in values], [y for _, y in values], label=measure, s=30, **dot(at))
        axes.set_xlabel(axis)
        figure.legend(loc="outside lower center", ncols=min(4, len(found)))

    return Figure(key, title, f"{', '.join(measures)} against {axis}, {len(points)} points.", draw, grid, f"{title}.")
