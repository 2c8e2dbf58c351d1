"""Our training step on top of OpenUnlearning's ``UnlearnTrainer``, built once its modules can be imported.

Its data is brought into the form the training step needs, with clear errors where it cannot be used.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf
from transformers import Trainer

from ..data.mismatch import mismatched
from ..errors import ConfigError, DataError, RosuError
from ..training.checkpoints import last_complete, resolve_resume
from ..training.config import MethodArguments
from ..training.window import PARTS
from .arguments import HOLDOUT, describe, read_method_args
from .evaluation import MainProcessEvaluation
from .registration import TRAINERS

if TYPE_CHECKING:
    from ..training.trainer import ROSUMixin as Base
else:
    Base = object

logger = logging.getLogger(__name__)


class FromOpenUnlearning(Base):
    """Translates the call of OpenUnlearning's ``load_trainer`` into that of our training step.

    ``load_trainer`` passes Trainer's arguments, its own (``evaluators``, ``template_args``) and, on the same level,
    everything under ``trainer.method_args``.
    """

    alias: str

    def __init__(self, **given: Any) -> None:
        parameters = {*inspect.signature(Trainer.__init__).parameters, "evaluators", "template_args"} - {"self"}
        own = {name: given.pop(name) for name in list(given) if name in parameters}
        holdout = given.pop(HOLDOUT, None)
        settings = read_method_args(self.alias, given)
        check_parts(own.get("train_dataset"))
        check_unseen(settings, holdout)
        if holdout is not None:
            tokenizer = own.get("processing_class", own.get("tokenizer"))
            own["holdout_dataset"] = load_holdout(holdout, tokenizer, own.get("template_args"))
        if own.get("data_collator") is not None:
            own["data_collator"] = AlternatesBeside(own["data_collator"])
            if "mismatch" in settings.rule().passes:
                own["data_collator"] = MismatchBeside(own["data_collator"])
        own["args"].remove_unused_columns = False  # the columns are nested under forget and retain
        self._resume = resume_point(own["args"])
        logger.info("trainer=%s: %s", self.alias, describe(settings))
        super().__init__(method_args=settings, **own)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer leaves ``trainer.args.resume_from_checkpoint`` to its caller, and OpenUnlearning passes nothing."""
        return super().train(resume_from_checkpoint or self._resume, *args, **kwargs)


def check_unseen(settings: MethodArguments, holdout: Any) -> None:
    """Raise for settings that measure on data which OpenUnlearning's configuration does not name."""
    for name in ("calibrate", "forget_until"):
        if getattr(settings, name) == "holdout" and holdout is None:
            raise ConfigError(
                f"{name}=holdout needs never-trained samples: add +data/datasets@trainer.method_args.holdout_data="
                f"TOFU_QA_holdout (or another of configs/data/datasets), or set trainer.method_args.{name} to a "
                "target loss such as 2.5."
            )
    if settings.forget_until in ("base", "alternates"):
        raise ConfigError(
            f"forget_until={settings.forget_until} needs a model or answers that OpenUnlearning's configuration has no "
            "place for: use trainer.method_args.forget_until=holdout, a target loss, or 'rosu train'."
        )
    if settings.rule().stored:
        raise ConfigError(
            f"method={settings.method} stores gradients of retain data, for which OpenUnlearning's configuration has "
            "no place: use 'rosu train'."
        )
    if settings.budget is not None:
        raise ConfigError(
            f"budget={settings.budget} needs data for which OpenUnlearning's configuration has no place: use 'rosu "
            "train'."
        )


def resume_point(args: Any) -> str | None:
    """The checkpoint that ``trainer.args.resume_from_checkpoint`` means: a folder, true, or auto (if there is one).

    Without one, a model that is in the output folder already is about to be replaced: a warning says so.
    """
    asked, folder = args.resume_from_checkpoint, Path(args.output_dir)
    if asked is not None and (str(args.save_strategy).rpartition(".")[2].lower() == "no" or args.save_only_model):
        logger.warning(
            "This run will save no checkpoint to resume from: add trainer.args.save_strategy=epoch "
            "trainer.args.save_only_model=false."
        )
    words = {"true": True, "false": None}
    if str(asked).lower() == "auto":
        found = last_complete(folder, resumable=True) if folder.is_dir() else None
        logger.info("resume_from_checkpoint=auto: %s", f"from {found}" if found else "from the beginning")
        asked = None if found is None else str(found)
    checkpoint = resolve_resume(words.get(str(asked).lower(), asked), args.output_dir)
    if checkpoint is None and any(folder.glob("*.safetensors")):
        logger.warning(
            "%s holds a model already, which this run replaces: give every run a task_name of its own, in a multirun "
            "for instance 'task_name=${trainer.handler}_${trainer.method_args.rho}'.",
            folder,
        )
    return checkpoint


def build_trainer(name: str) -> type:
    """The class for a trainer alias; its name is the key under which OpenUnlearning registers it."""
    try:
        base = import_module("trainer.unlearn.base").UnlearnTrainer
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"This OpenUnlearning checkout has no trainer.unlearn.base.UnlearnTrainer: {error}."
        ) from error
    step = resolve_name(TRAINERS[name].mixin)
    return type(name, (FromOpenUnlearning, step, MainProcessEvaluation, base), {"alias": name, "__module__": __name__})


class AlternatesBeside:
    """A collator around OpenUnlearning's.

    Its IDK data nests once more: ``{"original": A, "alternate": B}``. Losses read the original where they expect a
    batch and find the other under ``alternate``; anything else passes unchanged.
    """

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, items: Any) -> Any:
        batch = self.collator(items)
        if isinstance(batch, Mapping):
            return {key: self._beside(value) for key, value in batch.items()}
        return batch

    @staticmethod
    def _beside(part: Any) -> Any:
        if isinstance(part, Mapping) and "original" in part and "alternate" in part:
            return {**part["original"], "alternate": part["alternate"]}
        return part


class MismatchBeside:
    """A collator that also gives each forget question the answer of the retain sample beside it."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, items: Any) -> Any:
        batch = self.collator(items)
        if not isinstance(batch, Mapping) or not all(part in batch for part in PARTS):
            return batch
        wrong = [mismatched(item["forget"], item["retain"]) for item in items]
        tensors = [{name: torch.tensor(values) for name, values in sample.items()} for sample in wrong]
        both = [{"forget": sample, "retain": sample} for sample in tensors]
        return {**batch, "mismatch": self.collator(both)["forget"]}


def check_parts(dataset: Any) -> None:
    """Raise before training if an item has no forget or no retain part."""
    if dataset is None or not hasattr(dataset, "__getitem__") or len(dataset) == 0:
        raise DataError("There is no training data: set data/datasets@data.forget and data/datasets@data.retain.")
    with torch.random.fork_rng(devices=[]):  # it draws partners at random; this check must not change the run
        item = dataset[0]
    keys = sorted(map(str, item)) if isinstance(item, Mapping) else [type(item).__name__]
    for part in PARTS:
        if part not in keys:
            hint = "" if any(p in keys for p in PARTS) else " and --config-name=unlearn.yaml (mode: unlearn)"
            raise DataError(
                f"The data has no {part} part (its samples hold {', '.join(keys)}): unlearning needs forget and retain "
                f"samples. Set data/datasets@data.{part}=…{hint}."
            )


def load_holdout(config: Any, tokenizer: Any, template_args: Any) -> Any:
    """The never-trained samples of ``method_args.holdout_data``, loaded by OpenUnlearning itself.

    ``config`` has the form of its ``configs/data/datasets/*.yaml``: one named data set with ``handler`` and ``args``.
    """
    if not isinstance(config, Mapping) and not OmegaConf.is_dict(config):
        raise DataError(
            f"method_args.holdout_data={config!r} must be a data set as in configs/data/datasets, e.g. "
            "+data/datasets@trainer.method_args.holdout_data=TOFU_QA_holdout."
        )
    tree = config if OmegaConf.is_config(config) else OmegaConf.create(dict(config))
    if len(tree) != 1:
        raise DataError(
            f"method_args.holdout_data must hold one data set, not {len(tree)}: {', '.join(map(str, tree))}."
        )
    try:
        return import_module("data").get_datasets(tree, tokenizer=tokenizer, template_args=template_args)
    except RosuError:
        raise
    except Exception as error:
        raise DataError(f"method_args.holdout_data could not be loaded: {' '.join(str(error).split())}") from error
