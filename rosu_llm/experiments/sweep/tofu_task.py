"""Search on TOFU: every trial is evaluated in full, and selected by Agg_MU as the paper does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...errors import DataError
from ...evaluation.aggregates import auc_transform, harmonic_mean
from ...evaluation.collection import check_comparable
from ...evaluation.results import FILES, Result, read_result
from ...evaluation.tofu.metrics import UTILITY
from ...evaluation.tofu.questions import load_questions
from ...evaluation.tofu.run import TofuSettings, evaluate_tofu
from ...evaluation.tofu.summary import FLUENCY, MEMORISATION, summarise
from ..config_task import ConfigTask
from ..settings import complete
from ..task import Steps
from .task import SCORES, SELECTED_BY, Figures, References, Run, Scores
from .tofu_reference import Reference

#: What pruning looks at: Mem as it is, and the parts of model utility for which nothing has to be generated.
GLANCE_UTILITY = tuple(name for name in UTILITY if not name.endswith("ROUGE"))
GLANCE = (*MEMORISATION.values(), *GLANCE_UTILITY)
_OF_UTILITY = (SELECTED_BY, "Util", "Agg")


@dataclass(frozen=True, kw_only=True)
class TofuEvaluation:
    """How trials are evaluated.

    Attributes:
        settings: of every evaluation; without a ``fluency_model`` Util is model utility alone and says so.
        glance_limit: first rows per data set that pruning looks at.
        retain: the model that never saw the forget set, for Priv.
        target: the initial model, to which Util is then relative.
    """

    settings: TofuSettings
    glance_limit: int = 100
    retain: Reference | None = None
    target: Reference | None = None


class TofuTask:
    """A recipe whose forget data is a split of TOFU.

    Args:
        folder: where evaluations of reference models are kept.
    """

    name = "tofu"

    def __init__(self, values: Mapping[str, Any], seed: int, how: TofuEvaluation, folder: Path) -> None:
        self._task, self._seed, self._how, self._folder = ConfigTask(values), seed, how, folder
        self.base = self._task.base
        self._with_fluency = how.settings.fluency_model is not None

    @property
    def headings(self) -> Mapping[str, str]:
        suffix = "" if self._with_fluency else " (MU only)"
        return {name: name + (suffix if name in _OF_UTILITY else "") for name in SCORES}

    @property
    def definition(self) -> str:
        util = "HM(model utility, fluency)" if self._with_fluency else "model utility alone, as fluency is not measured"
        relative = "relative to the initial model" if self._how.target else "raw, not relative to the initial model"
        return (
            f"Agg_MU = HM(Mem, Util) with Mem = HM(1 − ES, 1 − EM, 1 − ParaProb, 1 − TR) on the forget set and Util = "
            f"{util}, {relative}."
        )

    @property
    def glance_definition(self) -> str:
        return (
            f"HM(Mem, U) on the first {self._how.glance_limit} questions, U the harmonic mean of the six parts of "
            "model utility that need no generated text"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        settings = self._how.settings
        first = "" if settings.limit is None else f", first {settings.limit} questions of every data set"
        privacy = "not measured (give --retain)"
        if self._how.retain:
            privacy = f"AUC transform 'range', {auc_transform('range').formula}; no part in selecting"
        return (f"TOFU {settings.forget_split}{first}. {self.definition}", f"Priv: {privacy}.")

    def evaluation(self) -> dict[str, Any]:
        named = {"retain": self._how.retain, "target": self._how.target}
        return {
            **self._task.identity(complete(self.base)),
            "task": self.name,
            **asdict(self._how.settings),
            "glance_limit": self._how.glance_limit,
            **{name: reference.key if reference else None for name, reference in named.items()},
        }

    def refer(self, steps: Steps) -> dict[str, dict[str, float]]:
        results = {name: self._result(name) for name in ("initial", "retain")}
        known = {name: result for name, result in results.items() if result is not None}
        check_comparable(list(known.values()))
        settings = self._how.settings
        asked = len(load_questions(settings.data, settings.forget_split, {"forget"}, settings.limit).rows["forget"])
        for name, result in known.items():
            if result.split not in (None, settings.forget_split) or result.questions not in (None, asked):
                raise DataError(
                    f"The results of the {name} model in {result.path} are of {result.questions} questions of "
                    f"{result.split or 'an unknown split'}, but trials are asked {asked} of {settings.forget_split}."
                )
        figures = {name: self._usable(result.figures) for name, result in known.items()}
        if "initial" in figures:
            missing = summarise(figures["initial"], target=figures["initial"], with_fluency=self._with_fluency).missing
            if "Util" in missing:
                needs = ", ".join(missing["Util"])
                raise DataError(f"Util cannot be relative to --target {known['initial'].path}: it needs {needs}.")
        return figures

    def scores(self, figures: Figures, references: References) -> Scores:
        summary = summarise(
            self._usable(figures),
            retain=references.get("retain"),
            target=references.get("initial"),
            with_fluency=self._with_fluency,
        )
        columns = summary.columns()
        return {name: columns[name] for name in SCORES}

    def start(self, values: Mapping[str, Any], references: References, folder: Path, steps: Steps) -> Run:
        trainer, _ = self._task.prepare(values, self._seed, folder, steps)
        settings, name = self._how.settings, str(values["model_name_or_path"])

        def measure() -> dict[str, float]:
            retain = self._path("retain")
            out = folder / "evals"
            return evaluate_tofu(trainer.model, trainer.processing_class, settings, out, retain=retain, name=name)

        def glance() -> float:
            quick = replace(settings, metrics=GLANCE, limit=self._shorter(settings.limit), fluency_model=None)
            with TemporaryDirectory() as scratch:
                figures = evaluate_tofu(
                    trainer.model, trainer.processing_class, quick, Path(scratch), identity="glance", name=name
                )
            mem = harmonic_mean(1 - figures[part] for part in MEMORISATION.values())
            return harmonic_mean((mem, harmonic_mean(figures[part] for part in GLANCE_UTILITY)))

        return Run(trainer, measure, glance)

    def _usable(self, figures: Figures) -> dict[str, float]:
        """Without fluency where the trials have none, so that no column mixes two definitions."""
        return {name: value for name, value in figures.items() if self._with_fluency or name != FLUENCY}

    def _shorter(self, limit: int | None) -> int:
        return min(self._how.glance_limit, limit or self._how.glance_limit)

    def _reference(self, name: str) -> Reference | None:
        return self._how.retain if name == "retain" else self._how.target

    def _path(self, name: str) -> Path | None:
        """The result file of a reference model; where it is a model, the one its evaluation writes."""
        reference = self._reference(name)
        if reference is None or reference.file is not None:
            return reference.file if reference else None
        about = json.dumps([reference.key, asdict(self._how.settings)], sort_keys=True)
        return self._folder / f"{name}-{hashlib.sha256(about.encode()).hexdigest()[:12]}" / FILES[0]

    def _result(self, name: str) -> Result | None:
        reference, path = self._reference(name), self._path(name)
        if reference is None or path is None:
            return None
        if reference.source is not None:
            model, tokenizer = reference.load(self.base)
            name = reference.source.name
            evaluate_tofu(model, tokenizer, self._how.settings, path.parent, identity=reference.key, name=name)
        return read_result(path)
