"""A search (``trials.json``): its trials as a table, best first, its frontier, and the recipe of the best trial."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..evaluation.tofu.summary import harmonic_mean
from ..experiments.attempt import DONE, KILLED
from ..experiments.sweep.collect import SweepDocument
from ..experiments.sweep.scoring import SCORES, SELECTED_BY
from ..files import write_atomically, write_json
from .blocks import MISSING, Figure, Footnotes, Missing, Row, Section, Table, TableCell, Text, shown, text_table
from .drawing import legend
from .writers import write_figures, write_table

#: Reference model → its name, marker and colour.
_REFERENCES = {"initial": ("initial model", "X", "0.5"), "retain": ("retain model", "P", "C4")}


def sweep_section(content: SweepDocument) -> Section:
    """What was searched and found, the frontier, and the trials."""
    said = Text(f"Study {content['study']}: {_counts(content)}. {content['objective']['definition']}")
    table, figure = sweep_table(content), frontier_figure(content)
    reason = Missing("No frontier of the sweep: no trial is done, or none has both Mem and Util.")
    return Section("sweep", f"Study {content['study']}", [said, figure or reason, table])


def sweep_table(content: SweepDocument) -> Table:
    """Settings that were searched, the five scores, state and seconds of every trial; killed attempts are left out."""
    footnotes = Footnotes()
    rows = [
        Row(_REFERENCES[name][0], _cells(content, {"scores": entry["scores"]}, None), True)
        for name, entry in content["references"].items()
    ]
    trials = [trial for trial in content["trials"] if trial["state"] != KILLED]
    for trial in sorted(trials, key=lambda trial: (trial["rank"] or len(trials) + 1, trial["state"], trial["number"])):
        cells = _cells(content, trial, footnotes.mark(trial["error"]))
        rows.append(Row(f"trial {trial['number']}", cells, details={"figures": trial["figures"]}))
    columns = ("rank", *content["space"], *(content["headings"][name] for name in SCORES), "state", "seconds")
    states = [trial["state"] for trial in content["trials"]]
    notes = [f"Ranked by {SELECTED_BY} alone. Trials: {_counts(content)}.", *content["notes"]]
    if "pruned" in states:
        notes.append(f"Pruned: ended early because of {content['pruned_by']}.")
    if content["importance"]:
        shares = ", ".join(f"{key} {share:.2f}" for key, share in content["importance"].items())
        notes.append(f"Importance for {SELECTED_BY} (fANOVA over {states.count(DONE)} trials): {shares}.")
    caption = "Trials of the sweep, best first"
    return Table(columns, tuple(rows), tuple(notes), tuple(footnotes), caption=caption, digits=3)


def _cells(content: SweepDocument, trial: Mapping[str, Any], footnote: int | None) -> tuple[TableCell, ...]:
    rank, seconds, settings = trial.get("rank"), trial.get("seconds"), trial.get("settings", {})
    return (
        TableCell(text=None if rank is None else str(rank)),
        *(TableCell(text=shown(settings[key]) if key in settings else None) for key in content["space"]),
        *(TableCell(trial["scores"].get(name)) for name in SCORES),
        TableCell(footnote=footnote, text=trial.get("state")),
        TableCell(text=None if seconds is None else f"{seconds:.0f}"),
    )


def narrow(table: Table, content: SweepDocument) -> Table:
    """The same for a terminal of 80 columns: all settings in one column."""
    count, rows = len(content["space"]), []
    for row, (label, rank, *cells) in zip(table.rows, table.lines(), strict=True):
        pairs = zip(content["space"], cells[:count], strict=True)
        settings = label if row.reference else ", ".join(f"{key} {value}" for key, value in pairs)
        trial = MISSING if row.reference else label.removeprefix("trial ")
        rows.append((trial, rank, settings, *cells[count:]))
    columns, caption = ("trial", "rank", "settings", *SCORES, "state", "s"), f"Study {content['study']}"
    return text_table(caption, columns, rows, notes=table.notes, footnotes=table.footnotes)


def _counts(content: SweepDocument) -> str:
    states = [trial["state"] for trial in content["trials"]]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "no trial yet"


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


def frontier_figure(content: SweepDocument) -> Figure | None:
    """Mem against Util of the finished trials, on level curves of their harmonic mean; None if no trial has both."""
    done = [trial for trial in content["trials"] if trial["state"] == DONE]
    known = {trial["number"]: place for trial in done if (place := _place(trial)) is not None}
    if not known:
        return None
    front = sorted(known[number] for number in content["pareto"] if number in known)
    others = [place for number, place in known.items() if number not in content["pareto"]]
    best = next((trial for trial in content["trials"] if trial["number"] == content["best"]), None)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        dots = {"s": 42, "edgecolor": "white", "linewidth": 0.6}
        if others:
            axes.scatter(*zip(*others, strict=True), color="0.6", label="trial", zorder=3, **dots)
        if front:
            axes.plot(*zip(*front, strict=True), color="C0", linewidth=1.0, drawstyle="steps-pre", zorder=3)
            axes.scatter(*zip(*front, strict=True), color="C0", label="on the frontier", zorder=4, **dots)
        if best and best["number"] in known:
            score = f"{content['headings'][SELECTED_BY]} {best['scores'][SELECTED_BY]:.2f}"
            star = {"marker": "*", "color": "C1", "edgecolor": "white", "s": 230}
            axes.scatter(*known[best["number"]], label=f"best: trial {best['number']}, {score}", zorder=5, **star)
        for name, entry in content["references"].items():
            text, marker, color = _REFERENCES[name]
            if (place := _place(entry)) is not None:
                axes.scatter(*place, s=90, marker=marker, color=color, edgecolor="white", label=text, zorder=4)
        axes.margins(0.08)
        _level_curves(axes)
        util, mem = (content["headings"][name] for name in ("Util", "Mem"))
        axes.set(xlabel=f"{util}: what is kept", ylabel=f"{mem}: what is forgotten")
        axes.grid(False)
        legend(figure, axes)

    rows = [
        (str(number), shown(mem), shown(util), "yes" if number in content["pareto"] else MISSING)
        for number, (util, mem) in known.items()
    ]
    data = text_table("Frontier of the sweep", ("trial", "Mem", "Util", "on the frontier"), rows)
    alt = f"Mem against Util of {len(known)} trials, {len(front)} of them on the frontier."
    caption = f"Mem against Util of every done trial. Grey curves: equal {SELECTED_BY}."
    return Figure("frontier", "Frontier of the sweep", alt, draw, data, caption, (5.4, 4.2))


def _place(entry: Mapping[str, Any]) -> tuple[float, float] | None:
    util, mem = (entry["scores"].get(name) for name in ("Util", "Mem"))
    return None if util is None or mem is None else (float(util), float(mem))


def _level_curves(axes: Any) -> None:
    """Curves of equal harmonic mean, each with its value where it leaves the part that is shown."""
    import numpy as np

    across, up = axes.get_xlim(), axes.get_ylim()
    for level in levels(across, up):
        x = np.linspace(max(across[0], level / 2 + 1e-3), across[1], 400)
        y = level_curve(level, x)
        seen = np.flatnonzero((y >= up[0]) & (y <= up[1]))
        axes.plot(x, y, color="0.8", linewidth=0.9, zorder=1)
        if len(seen):
            at = int(seen[-1])
            axes.annotate(f"{level:g}", (x[at], y[at]), color="0.5", fontsize=8, ha="right", va="bottom", zorder=2)
    axes.set(xlim=across, ylim=up)


def write_sweep(content: SweepDocument, out: Path) -> tuple[list[Path], str | None]:
    """Write trials, table, frontier and the best recipe; returns the files, and why there is no plot if so."""
    written = [write_json(out / "trials.json", content), *write_table(sweep_table(content), out / "table")]
    if content["best"] is None:
        return written, None
    written.append(out / "best.yaml")
    write_atomically(written[-1], best_recipe(content, out))
    figure = frontier_figure(content)
    drawn, problem = write_figures([figure] if figure else [], out)
    return [*written, *drawn], problem


def best_recipe(content: SweepDocument, out: Path) -> str:
    """The recipe with the best trial's settings, for ``rosu train --config``."""
    best = next(trial for trial in content["trials"] if trial["number"] == content["best"])
    scores = ", ".join(f"{name} {best['scores'][name]:.4f}" for name in (SELECTED_BY, "Mem", "Util"))
    study = f"study {content['study']}, the best of its trials by {SELECTED_BY}"
    lines = [f"# Trial {best['number']} of {study}: {scores}."]
    if "model_name_or_path" not in content["recipe"]:
        lines.append("# Found on the embedded people: add model_name_or_path, forget_data and retain_data of your own.")
    values = {**content["recipe"], **best["settings"], "seed": content["seed"], "output_dir": str(out / "best")}
    return "\n".join([*lines, yaml.safe_dump(values, sort_keys=False, allow_unicode=True)])
