"""Search without TOFU: the embedded people, or any configuration with data of its own, measured by its answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...evaluation.aggregates import auc_closeness, auc_transform, harmonic_mean
from ..config_task import ConfigTask
from ..demo.task import DemoTask
from ..settings import complete
from ..task import Steps
from .task import SCORES, SELECTED_BY, Figures, References, Run, Scores

#: Row of the task → name of the reference.
_REFERENCES = {"before": "initial", "retain_only": "retain"}


class AnswersTask:
    """Mem and Util from answers under teacher forcing, in place of TOFU's.

    Mem  = HM(1 − EM, 1 − p) on the forget data     EM: share of answer tokens reproduced, p: TOFU's probability
    Util = HM(EM, p) on the retain data, relative to the same of the model before unlearning
    Priv = closeness of the loss attack's AUC to that of a model trained without the forget data (demo only)
    """

    headings: Mapping[str, str] = {name: name for name in SCORES}
    definition = (
        "Agg_MU = HM(Mem, Util) with Mem = HM(1 − EM, 1 − p) on the forget data and Util = p on the retain data, "
        "relative to the model before; EM is the share of answer tokens reproduced, p the probability of an answer. "
        "These stand in for TOFU's Mem and Util and are not comparable with them."
    )
    glance_definition = "the same Agg_MU, measured on the way"

    def __init__(self, task: DemoTask | ConfigTask, seed: int) -> None:
        if "retain_prob" not in task.columns:
            raise ConfigError(
                "Representation-level runs have losses but no Mem and Util to select by: compare them with rosu "
                "ablate, or evaluate them with rosu eval wmdp."
            )
        self._task, self._seed = task, seed
        self.name = "demo" if isinstance(task, DemoTask) else "answers"
        self.base = task.base

    @property
    def notes(self) -> tuple[str, ...]:
        if self.name != "demo":
            return (self.definition, "Priv needs a model that never saw the forget data: not measured here.")
        formula = auc_transform("range").formula
        return (self.definition, f"Priv: loss attack, {formula}, r from the retain-only model; no part in selecting.")

    def evaluation(self) -> dict[str, Any]:
        return self._task.identity(complete(self.base))

    def refer(self, steps: Steps) -> dict[str, dict[str, float]]:
        return {_REFERENCES[row]: self._task.refer(row, self._seed, steps) for row in self._task.references}

    def scores(self, figures: Figures, references: References) -> Scores:
        mem = harmonic_mean((1 - figures["forget_em"], 1 - figures["forget_prob"]))
        util = figures["retain_prob"] / references["initial"]["retain_prob"]
        priv = None
        if "retain" in references:
            priv = auc_closeness(figures["mia_auc"], references["retain"]["mia_auc"])
        agg = None if priv is None else harmonic_mean((mem, util, priv))
        return dict(zip(SCORES, (harmonic_mean((mem, util)), mem, util, priv, agg), strict=True))

    def start(self, values: Mapping[str, Any], references: References, folder: Path, steps: Steps) -> Run:
        trainer, measure = self._task.prepare(values, self._seed, folder, steps)
        return Run(trainer, measure, lambda: self.scores(measure(), references)[SELECTED_BY] or 0.0)
