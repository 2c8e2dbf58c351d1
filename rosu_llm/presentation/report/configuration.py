"""Settings side by side, those that were changed first, and the environment each run had."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ... import __version__
from ..blocks import MISSING, Block, Missing, Section, Table, Text, shown, text_table
from .reading import ReportedRun


def configuration(runs: Sequence[ReportedRun]) -> Section:
    """What each run was told to do."""
    from ...recipes.settings import RunArguments, config_class

    known = [run for run in runs if run.settings]
    blocks: list[Block] = [Missing(f"Settings of {run.label} are not recorded.") for run in runs if not run.settings]
    if known:
        names = list(dict.fromkeys(name for run in known for name in run.settings))
        classes: Iterable[Any] = (RunArguments, *{config_class(run.settings) for run in known})
        defaults = {f.name: f.default for cls in classes for f in dataclasses.fields(cls)}
        changed = [name for name in names if any(_changed(run, name, defaults) for run in known)]
        rest = [name for name in names if name not in changed]
        if changed:
            blocks.append(_side_by_side("Settings that differ from their defaults", known, changed))
        if rest:
            blocks.append(_side_by_side("Settings left at their defaults", known, rest, folded=True))
        if len(known) > 1:
            blocks.append(Text("≠ and a coloured ground mark settings in which the runs differ."))
    return Section("configuration", "Configuration", blocks)


def environment(runs: Sequence[ReportedRun]) -> Section:
    """With what, and for how long."""
    facts: list[Mapping[str, Any]] = [{**run.facts, **run.versions} for run in runs]
    lacking = [run.label for run in runs if not run.versions]
    blocks: list[Block] = [Missing(f"Versions used by {label} are not recorded.") for label in lacking]
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    if names:
        rows = tuple((name, *(shown(fact.get(name)) for fact in facts)) for name in names)
        versions = {name for run in runs for name in run.versions}
        marked = frozenset((at, column) for at, column in _differing(rows) if rows[at][0] in versions)
        columns = ("what", *(run.label for run in runs))
        blocks.append(text_table("Versions and circumstances of each run", columns, rows, marked=marked))
    made = f"rosu_llm {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    blocks.append(Text(f"This page was made with {made}."))
    return Section("environment", "Environment", blocks)


def _changed(run: ReportedRun, name: str, defaults: Mapping[str, Any]) -> bool:
    """Whether the run's setting is known not to be the default.

    OpenUnlearning's defaults are not recorded, so everything that such a run lists counts as changed. Others are
    compared as text, then as numbers: records hold text where fields hold numbers or members of enumerations.
    """
    if name not in run.settings:
        return False
    if run.kind == "OpenUnlearning" or name not in defaults:
        return True
    value, default = run.settings[name], defaults[name]
    try:
        return str(value) != str(getattr(default, "value", default)) and float(value) != float(default)
    except (TypeError, ValueError):
        return True


def _side_by_side(caption: str, runs: Sequence[ReportedRun], names: Sequence[str], *, folded: bool = False) -> Table:
    def text(value: Any) -> str:
        return "none" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    rows = [(name, *(text(run.settings.get(name, MISSING)) for run in runs)) for name in names]
    marked = _differing(rows)
    differing = {row for row, _ in marked}
    named = [(f"≠ {row[0]}" if at in differing else row[0], *row[1:]) for at, row in enumerate(rows)]
    return text_table(caption, ("setting", *(run.label for run in runs)), named, marked=marked, folded=folded)


def _differing(rows: Sequence[Sequence[str]]) -> frozenset[tuple[int, int]]:
    """Cells of rows in which runs differ; a run that did not record the setting does not count."""
    found = [at for at, row in enumerate(rows) if len(set(row[1:]) - {MISSING}) > 1]
    return frozenset((at, column) for at in found for column in range(1, len(rows[at])))
