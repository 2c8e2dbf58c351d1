"""Sections made of what other verbs left in a run's folder; a file that does not hold what its schema says is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .blocks import Block, Missing, Section
from .run import REPORTS, Run

Content = Mapping[str, Any]
Builder = Callable[[str, str, Content], list[Block]]


def section(
    key: str, title: str, runs: Sequence[Run], builders: Mapping[str, Builder], hints: Mapping[str, str]
) -> Section:
    """The blocks of every file of ``builders``' schemas; ``hints`` say how to get one that no run has.

    A builder gets the run's label, a key that is unique on the page, and the file's content.
    """
    blocks: list[Block] = []
    for schema, builder in builders.items():
        seen: list[Content] = []
        for at, run in enumerate(runs):
            content = run.reports.get(schema)
            if content is None or content in seen:  # trials of one sweep share its file
                continue
            seen.append(content)
            try:
                blocks += builder(run.label, f"{key}_{at}", content)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                name = REPORTS[schema]
                blocks.append(Missing(f"{name} of {run.label} is not as it should be ({error!r}); it is left out."))
        if not seen:
            blocks.append(Missing(hints[schema]))
    return Section(key, title, blocks)
