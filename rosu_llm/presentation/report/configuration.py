"""Settings side by side, those that were changed first, and the environment each run had."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ... import __version__
from .blocks import MISSING, Block, Grid, Missing, Section, Text, shown
from .run import Run


def configuration(runs: Sequence[Run]) -> Section:
    """What each run was told to do."""
    known = [run for run in runs if run.settings]
    blocks: list[Block] = [Missing(f"Settings of {run.label} are not recorded.") for run in runs if not run.settings]
    if known:
        names = list(dict.fromkeys(name for run in known for name in run.settings))
        plain = _defaults(known)
        # An OpenUnlearning run has its own defaults, which nobody recorded: everything it lists counts as chosen.
        changed = [name for name in names if any(_chosen(run, name, plain) for run in known)]
        rest = [name for name in names if name not in changed]
        if changed:
            blocks.append(_side_by_side("Settings that differ from their defaults", known, changed))
        if rest:
            blocks.append(_side_by_side("Settings left at their defaults", known, rest, folded=True))
        if len(known) > 1:
            blocks.append(Text("≠ and a coloured ground mark settings in which the runs differ."))
    return Section("configuration", "Configuration", blocks)


def environment(runs: Sequence[Run]) -> Section:
    """With what, and for how long."""
    facts: list[Mapping[str, Any]] = [{**run.facts, **run.versions} for run in runs]
    blocks: list[Block] = [
        Missing(f"Versions used by {run.label} are not recorded.") for run in runs if not run.versions
    ]
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    if names:
        rows = tuple((name, *(shown(fact.get(name)) for fact in facts)) for name in names)
        versions = {name for run in runs for name in run.versions}
        marked = frozenset((at, column) for at, column in _differing(rows) if rows[at][0] in versions)
        columns = ("what", *(run.label for run in runs))
        blocks.append(Grid("Versions and circumstances of each run", columns, rows, marked))
    made = f"rosu_llm {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    blocks.append(Text(f"This page was made with {made}."))
    return Section("environment", "Environment", blocks)


def _defaults(runs: Sequence[Run]) -> dict[str, Any]:
    """The default of every setting of ``rosu train``."""
    from ...recipes.settings import RunArguments, config_class

    classes: Iterable[Any] = (RunArguments, *{config_class(run.settings) for run in runs})
    return {f.name: f.default for cls in classes for f in dataclasses.fields(cls)}


def _chosen(run: Run, name: str, plain: Mapping[str, Any]) -> bool:
    if name not in run.settings:
        return False
    return run.kind == "OpenUnlearning" or name not in plain or not _equal(run.settings[name], plain[name])


def _equal(value: Any, default: Any) -> bool:
    """By what they say: records hold text where fields hold numbers or members of an enumeration."""
    if str(value) == str(getattr(default, "value", default)):
        return True
    try:
        return float(value) == float(default)
    except (TypeError, ValueError):
        return False


def _side_by_side(caption: str, runs: Sequence[Run], names: Sequence[str], *, folded: bool = False) -> Grid:
    rows = [(name, *(_value(run.settings.get(name, MISSING)) for run in runs)) for name in names]
    marked = _differing(rows)
    differing = {row for row, _ in marked}
    named = tuple((f"≠ {row[0]}" if at in differing else row[0], *row[1:]) for at, row in enumerate(rows))
    return Grid(caption, ("setting", *(run.label for run in runs)), named, marked, folded=folded)


def _value(value: Any) -> str:
    return "none" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _differing(rows: Sequence[Sequence[str]]) -> frozenset[tuple[int, int]]:
    """Cells of rows in which runs disagree; one that recorded nothing does not."""
    found = [at for at, row in enumerate(rows) if len(set(row[1:]) - {MISSING}) > 1]
    return frozenset((at, column) for at in found for column in range(1, len(rows[at])))
