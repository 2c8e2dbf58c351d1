"""The frontier of a sweep (``trials.json``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .blocks import MISSING, Block, Figure, Grid, Missing, Section, Text, shown
from .other_verbs import Content, section
from .run import SWEEP, Run


def sweep(runs: Sequence[Run]) -> Section:
    """Table and frontier of every sweep the runs belong to."""
    hint = "No sweep: rosu sweep searches settings and leaves trials.json."
    return section("sweep", "Sweep", runs, {SWEEP: _blocks}, {SWEEP: hint})


def _blocks(label: str, key: str, content: Content) -> list[Block]:
    trials = [trial for trial in content["trials"] if trial["state"] == "done"]
    states = [trial["state"] for trial in content["trials"]]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    said = f"Study {content['study']}: {counted or 'no trial yet'}. {content['objective']['definition']}"
    if not trials:
        return [Text(said), Missing(f"No trial of the sweep of {label} is done.")]
    names, scores = list(content["space"]), list(content["headings"])
    ranked = sorted(trials, key=lambda trial: trial["rank"] or len(trials) + 1)
    rows = tuple(
        (
            str(trial["number"]) + (" (best)" if trial["number"] == content["best"] else ""),
            *(shown(trial["settings"].get(name)) for name in names),
            *(shown(trial["scores"].get(score), 3) for score in scores),
        )
        for trial in ranked
    )
    columns = ("trial", *names, *(str(content["headings"][score]) for score in scores))
    grid = Grid("Trials of the sweep, best first", columns, rows, notes=tuple(map(str, content["notes"])))
    return [Text(said), *_frontier(key, content, trials), grid]


def _frontier(key: str, content: Content, trials: Sequence[Content]) -> list[Block]:
    points = {t["number"]: (t["scores"].get("Mem"), t["scores"].get("Util")) for t in trials}
    known = {number: (float(x), float(y)) for number, (x, y) in points.items() if x is not None and y is not None}
    if not known:
        return [Missing("No frontier of the sweep: no trial has both Mem and Util.")]
    front = sorted(known[number] for number in content["pareto"] if number in known)
    best = known.get(content["best"])

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.scatter([x for x, _ in known.values()], [y for _, y in known.values()], color="C0", s=28, label="trial")
        if front:
            axes.plot([x for x, _ in front], [y for _, y in front], color="C1", linestyle="--", label="frontier")
        if best:
            axes.scatter(*best, color="C1", marker="*", s=160, zorder=3, label="best Agg_MU")
        axes.set_xlabel("Mem: forget set no longer known")
        axes.set_ylabel("Util: ability kept")
        figure.legend(loc="outside lower center", ncols=3)

    on = set(content["pareto"])
    rows = tuple((str(n), shown(x), shown(y), "yes" if n in on else MISSING) for n, (x, y) in known.items())
    data = Grid("Frontier of the sweep", ("trial", "Mem", "Util", "on the frontier"), rows)
    alt = f"Util against Mem of {len(known)} trials, {len(front)} of them on the frontier."
    return [
        Figure(f"{key}_frontier", "Frontier of the sweep", alt, draw, data, "Util against Mem of every done trial.")
    ]
