"""What a search needs to know of its task: how a run starts, what is measured, and how figures become scores.

Whatever the task, the search sees Agg_MU = HM(Mem, Util) alone, in full at the end of a run and as a ``glance`` on the
way. Privacy is recorded and shown, but takes part in no decision: it needs a model that never saw the forget set, which
nobody has outside a benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..task import Measure, Steps

SELECTED_BY = "Agg_MU"
SCORES = (SELECTED_BY, "Mem", "Util", "Priv", "Agg")

Figures = Mapping[str, float]
Scores = dict[str, float | None]
#: Of the models to compare with: "initial" and "retain", as far as they are known.
References = Mapping[str, Figures]


class Run(NamedTuple):
    """A trial before its first step.

    Attributes:
        measure: every figure of the model as it is.
        glance: HM of memorisation and utility of the model as it is, cheaper than ``measure``; what pruning sees.
    """

    trainer: Any
    measure: Measure
    glance: Callable[[], float]


class SweepTask(Protocol):
    """A model, data and scores."""

    @property
    def name(self) -> str:
        """tofu, demo or answers."""

    @property
    def base(self) -> Mapping[str, Any]:
        """Settings that every trial starts from."""

    @property
    def definition(self) -> str:
        """What Agg_MU is here."""

    @property
    def glance_definition(self) -> str:
        """What pruning sees."""

    @property
    def headings(self) -> Mapping[str, str]:
        """Score → what its column is called."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines below the table."""

    def evaluation(self) -> dict[str, Any]:
        """Everything besides settings that the figures depend on, as JSON."""

    def refer(self, steps: Steps) -> dict[str, dict[str, float]]:
        """The figures of the models to compare with."""

    def scores(self, figures: Figures, references: References) -> Scores:
        """The five scores; None where they cannot be formed."""

    def start(self, values: Mapping[str, Any], references: References, folder: Path, steps: Steps) -> Run:
        """Load the model and the data, and build the trainer."""
