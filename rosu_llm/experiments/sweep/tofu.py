"""Search on TOFU: every trial is evaluated in full, and selected by Agg_MU as the paper does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...errors import DataError
from ...evaluation.model_identity import Model, find_model, identity, is_model
from ...evaluation.tofu.collection import check_comparable, find_reference, without
from ...evaluation.tofu.document import FILES
from ...evaluation.tofu.evaluate import evaluate_tofu
from ...evaluation.tofu.metrics import UTILITY, TofuSettings
from ...evaluation.tofu.questions import load_questions
from ...evaluation.tofu.results import Result, read_result
from ...evaluation.tofu.run import Loading, load
from ...evaluation.tofu.summary import FLUENCY, MEMORISATION, MODEL_UTILITY, auc_transform, harmonic_mean, summarise
from ...recipes.settings import build, type_values
from ..attempt import Figures, Started, Steps
from ..config_task import ConfigTask
from .scoring import REFERENCE_NAMES, SCORES, SELECTED_BY, References, Scores, Scoring

#: What pruning looks at: Mem as it is, and the parts of model utility for which nothing has to be generated.
GLANCE_UTILITY = tuple(name for name in UTILITY if not name.endswith("ROUGE"))
GLANCE = (*MEMORISATION.values(), *GLANCE_UTILITY)


@dataclass(frozen=True)
class TofuReference:
    """A model that trials are compared with, given by its results or as a model to be evaluated.

    Attributes:
        key: tells its contents from others.
        file: its results, where they exist already; otherwise there is a
        source: the model.
    """

    key: str
    file: Path | None = None
    source: Model | None = None


def find(given: str, settings: TofuSettings) -> TofuReference:
    """``given`` is a result file, a model, or a folder with results of evaluations like this."""
    path = Path(given).expanduser()
    if path.is_file() or (path.is_dir() and not is_model(path)):
        file = find_reference(path, settings.forget_split, without(settings.held_out_questions))
        return TofuReference(f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}", file)
    source = find_model(given, adapters=True)
    return TofuReference(identity(source), source=source)


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
    retain: TofuReference | None = None
    target: TofuReference | None = None

    @property
    def with_fluency(self) -> bool:
        """Whether fluency is measured."""
        return self.settings.fluency_model is not None

    @property
    def references(self) -> dict[str, TofuReference]:
        """The models to compare with, by their names in a study."""
        named = {"initial": self.target, "retain": self.retain}
        return {name: reference for name, reference in named.items() if reference is not None}

    def usable(self, figures: Figures) -> dict[str, float]:
        """Without fluency where the trials have none, so that no column mixes two definitions."""
        return {name: value for name, value in figures.items() if self.with_fluency or name != FLUENCY}


def tofu_scoring(how: TofuEvaluation) -> Scoring:
    """The paper's scores."""
    util = "HM(model utility, fluency)" if how.with_fluency else "model utility alone, as fluency is not measured"
    relative = "relative to the initial model" if how.target else "raw, not relative to the initial model"
    definition = (
        f"Agg_MU = HM(Mem, Util) with Mem = HM(1 − ES, 1 − EM, 1 − ParaProb, 1 − TR) on the forget set and Util = "
        f"{util}, {relative}."
    )
    glance = (
        f"HM(Mem, U) on the first {how.glance_limit} questions, U the harmonic mean of the six parts of model utility "
        "that need no generated text"
    )
    limit, privacy = how.settings.limit, "not measured (give --retain)"
    first = "" if limit is None else f", first {limit} questions of every data set"
    if how.retain:
        privacy = f"AUC transform 'range', {auc_transform('range').formula}; no part in selecting"
    notes = (f"TOFU {how.settings.forget_split}{first}. {definition}", f"Priv: {privacy}.")
    suffixes = {} if how.with_fluency else dict.fromkeys((SELECTED_BY, "Util", "Agg"), " (MU only)")
    headings = {name: name + suffixes.get(name, "") for name in SCORES}

    def scores(figures: Figures, references: References) -> Scores:
        retain, target = references.get("retain"), references.get("initial")
        summary = summarise(how.usable(figures), retain=retain, target=target, with_fluency=how.with_fluency)
        return {name: summary.columns()[name] for name in SCORES}

    return Scoring("tofu", definition, glance, notes, scores, headings)


class TofuTask(ConfigTask):
    """A recipe whose forget data is a split of TOFU.

    Args:
        folder: where evaluations of reference models are kept.
    """

    def __init__(self, values: Mapping[str, Any], how: TofuEvaluation, folder: Path) -> None:
        super().__init__(values)
        self._how, self._folder = how, folder
        self.columns = {**{name: label for label, name in MEMORISATION.items()}, MODEL_UTILITY: "MU"}
        self.plotted = tuple(self.columns)
        self.notes = ()
        self.references = {row: f"{name} model" for row, name in REFERENCE_NAMES.items() if name in how.references}

    def identity(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        keys = {name: reference.key for name, reference in self._how.references.items()}
        return {
            **super().identity(settings),
            "task": "tofu",
            **asdict(self._how.settings),
            "glance_limit": self._how.glance_limit,
            "retain": keys.get("retain"),
            "target": keys.get("initial"),
        }

    def refer(self, name: str, seed: int, steps: Steps) -> Started:
        figures = self._how.usable(self._results[REFERENCE_NAMES[name]].figures)
        return Started(None, lambda: figures)

    def start(self, values: Mapping[str, Any], seed: int, folder: Path, steps: Steps) -> Started:
        trainer = super().start(values, seed, folder, steps).trainer
        settings, name = self._how.settings, str(values["model_name_or_path"])
        training = {**type_values(values)[1], **trainer.method_args.method_dict()}

        def evaluate(how: TofuSettings, out: Path, **options: Any) -> dict[str, float]:
            tokenizer = trainer.processing_class
            return evaluate_tofu(trainer.model, tokenizer, how, out, name=name, training=training, **options)

        def glance() -> float:
            limit = min(self._how.glance_limit, settings.limit or self._how.glance_limit)
            quick = replace(settings, metrics=GLANCE, limit=limit, fluency_model=None)
            with TemporaryDirectory() as scratch:
                figures = evaluate(quick, Path(scratch), identity="glance")
            mem = harmonic_mean(1 - figures[part] for part in MEMORISATION.values())
            return harmonic_mean((mem, harmonic_mean(figures[part] for part in GLANCE_UTILITY)))

        return Started(trainer, lambda: evaluate(settings, folder / "evals", retain=self._path("retain")), glance)

    @cached_property
    def _results(self) -> dict[str, Result]:
        """Of the reference models, which are evaluated where they come without results; all must be comparable."""
        known = {name: self._result(name, reference) for name, reference in self._how.references.items()}
        check_comparable(list(known.values()))
        settings = self._how.settings
        rows = load_questions(settings, {"forget", "holdout"}).rows
        asked, unseen = len(rows["forget"]), len(rows["holdout"])
        for name, result in known.items():
            if result.split not in (None, settings.forget_split) or result.questions not in (None, asked):
                raise DataError(
                    f"The results of the {name} model in {result.path} are of {result.questions} questions of "
                    f"{result.split or 'an unknown split'}, but trials are asked {asked} of {settings.forget_split}."
                )
            if name == "retain" and {*result.non_members.values()} - {unseen}:
                raise DataError(
                    f"The attacks in {result.path} had {' and '.join(map(str, {*result.non_members.values()}))} "
                    f"non-members, and those of the trials have {unseen}: evaluate the retain model with the same "
                    "--held-out-questions, or give the model itself."
                )
        if "initial" in known:
            figures = self._how.usable(known["initial"].figures)
            missing = summarise(figures, target=figures, with_fluency=self._how.with_fluency).missing
            if "Util" in missing:
                needs = ", ".join(missing["Util"])
                raise DataError(f"Util cannot be relative to --target {known['initial'].path}: it needs {needs}.")
        return known

    def _path(self, name: str) -> Path | None:
        """The result file of a reference model; where it is a model, the one its evaluation writes."""
        reference = self._how.references.get(name)
        if reference is None or reference.file is not None:
            return reference.file if reference else None
        about = json.dumps([reference.key, asdict(self._how.settings)], sort_keys=True)
        return self._folder / f"{name}-{hashlib.sha256(about.encode()).hexdigest()[:12]}" / FILES[0]

    def _result(self, name: str, reference: TofuReference) -> Result:
        path = self._path(name)
        assert path is not None
        if reference.source is not None:
            arguments, config = build({**self.base, "output_dir": "unused"})  # in the precision of the recipe
            loading = Loading(
                dtype=arguments.dtype,
                attn_implementation=arguments.attn_implementation,
                trust_remote_code=arguments.trust_remote_code,
            )
            model, tokenizer = load(reference.source, loading, config.device)
            given = reference.source.name
            evaluate_tofu(model, tokenizer, self._how.settings, path.parent, identity=reference.key, name=given)
        return read_result(path)
