"""How figures become scores. Whatever the task, a search selects by Agg_MU = HM(Mem, Util) alone.

Privacy is recorded and shown, but takes part in no decision: it needs a model that never saw the forget set, which
nobody has outside a benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...errors import ConfigError
from ...evaluation.tofu.summary import auc_closeness, auc_transform, harmonic_mean
from ..attempt import Figures, Task

SELECTED_BY = "Agg_MU"
SCORES = (SELECTED_BY, "Mem", "Util", "Priv", "Agg")
#: Name of a task's reference model → its name in a study.
REFERENCE_NAMES = {"before": "initial", "retain_only": "retain"}

Scores = dict[str, float | None]
#: Of the models to compare with: "initial" and "retain", as far as they are known.
References = Mapping[str, Figures]


@dataclass(frozen=True)
class Scoring:
    """The scores of a task's figures, and how to read them.

    Attributes:
        name: tofu, demo or answers.
        definition: what Agg_MU is here.
        glance_definition: what pruning sees.
        notes: lines below the table.
        scores: the five scores of figures, given those of the references; None where they cannot be formed.
        headings: score → what its column is called.
    """

    name: str
    definition: str
    glance_definition: str
    notes: tuple[str, ...]
    scores: Callable[[Figures, References], Scores]
    headings: Mapping[str, str] = field(default_factory=lambda: {name: name for name in SCORES})


_DEFINITION = (
    "Agg_MU = HM(Mem, Util) with Mem = HM(1 − EM, 1 − p) on the forget data and Util = p on the retain data, "
    "relative to the model before; EM is the share of answer tokens reproduced, p the probability of an answer. "
    "These stand in for TOFU's Mem and Util and are not comparable with them."
)


def answers_scoring(task: Task) -> Scoring:
    """Scores without TOFU, from answers under teacher forcing: of the embedded people, or of data of one's own."""
    if "retain_prob" not in task.columns:
        raise ConfigError(
            "Representation-level runs have losses but no Mem and Util to select by: compare them with rosu "
            "ablate, or evaluate them with rosu eval wmdp."
        )
    name, privacy = "answers", "Priv needs a model that never saw the forget data: not measured here."
    if "retain_only" in task.references:
        formula = auc_transform("range").formula
        name, privacy = "demo", f"Priv: loss attack, {formula}, r from the retain-only model; no part in selecting."
    return Scoring(name, _DEFINITION, "the same Agg_MU, measured on the way", (_DEFINITION, privacy), _answer_scores)


def _answer_scores(figures: Figures, references: References) -> Scores:
    mem = harmonic_mean((1 - figures["forget_em"], 1 - figures["forget_prob"]))
    util = figures["retain_prob"] / references["initial"]["retain_prob"]
    priv = auc_closeness(figures["mia_auc"], references["retain"]["mia_auc"]) if "retain" in references else None
    agg = None if priv is None else harmonic_mean((mem, util, priv))
    return dict(zip(SCORES, (harmonic_mean((mem, util)), mem, util, priv, agg), strict=True))
