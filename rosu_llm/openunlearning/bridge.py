"""Our training step on top of OpenUnlearning's ``UnlearnTrainer``, built when its modules are at hand."""

from __future__ import annotations

import inspect
import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .aliases import TRAINERS
from .arguments import HOLDOUT, describe, read_method_args
from .data import AlternatesBeside, check_parts, load_holdout
from .evaluation import MainProcessEvaluation

if TYPE_CHECKING:
    from ..training.trainer import ROSUMixin as Base
else:
    Base = object

logger = logging.getLogger(__name__)


class FromOpenUnlearning(Base):
    """Translates the call of OpenUnlearning's ``load_trainer`` into that of our training step.

    It passes Trainer's arguments, its own (``evaluators``, ``template_args``) and, flat beside them, everything under
    ``trainer.method_args``.
    """

    alias: str

    def __init__(self, **given: Any) -> None:
        own = {name: given.pop(name) for name in list(given) if name in _trainer_parameters()}
        holdout = given.pop(HOLDOUT, None)
        settings = read_method_args(self.alias, given)
        check_parts(own.get("train_dataset"))
        if settings.calibrate == "holdout" and holdout is None:
            raise ConfigError(
                "calibrate=holdout needs never-trained samples: add +data/datasets@trainer.method_args.holdout_data="
                "TOFU_QA_holdout (or another of configs/data/datasets), or set trainer.method_args.calibrate to a "
                "target loss such as 2.5."
            )
        if holdout is not None:
            tokenizer = own.get("processing_class", own.get("tokenizer"))
            own["holdout_dataset"] = load_holdout(holdout, tokenizer, own.get("template_args"))
        if own.get("data_collator") is not None:
            own["data_collator"] = AlternatesBeside(own["data_collator"])
        own["args"].remove_unused_columns = False  # the columns are nested under forget and retain
        logger.info("trainer=%s: %s", self.alias, describe(settings))
        super().__init__(method_args=settings, **own)


def _trainer_parameters() -> set[str]:
    from transformers import Trainer

    return {*inspect.signature(Trainer.__init__).parameters, "evaluators", "template_args"} - {"self"}


def is_ours(trainer: Any) -> bool:
    """Whether a registered class was built here."""
    return isinstance(trainer, type) and issubclass(trainer, FromOpenUnlearning)


def build_trainer(name: str) -> type:
    """The class for a trainer alias; its name is the key under which OpenUnlearning registers it."""
    try:
        base = import_module("trainer.unlearn.base").UnlearnTrainer
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"This OpenUnlearning checkout has no trainer.unlearn.base.UnlearnTrainer: {error}."
        ) from error
    module, _, mixin = TRAINERS[name].mixin.partition(":")
    step = getattr(import_module(module), mixin)
    return type(name, (FromOpenUnlearning, step, MainProcessEvaluation, base), {"alias": name, "__module__": __name__})
