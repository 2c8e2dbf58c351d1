"""Our trainers' names inside OpenUnlearning, and how they get into its registry.

There are two steps, because Hydra reads callbacks from the configuration *without* its sweep: a multirun over trainers
(``-m trainer=GradDiff,ROSU``) never sees the callback of ``trainer/ROSU.yaml``. So the search-path plugin registers a
placeholder under every free name, and the callback, or the first call of a placeholder, replaces it by the class.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Alias:
    """What a trainer name stands for: a method of the registry on top of a training step.

    Attributes:
        method: name in :data:`rosu_llm.geometry.METHODS`.
        mixin: ``module:class`` of the training step that goes on top of OpenUnlearning's trainer.
        arguments: ``module:class`` of its settings.
        general: another method can be set with ``trainer.method_args.method``.
    """

    method: str
    mixin: str = "rosu_llm.training.trainer:ROSUMixin"
    arguments: str = "rosu_llm.openunlearning.arguments:BridgeArguments"
    general: bool = False


#: The alias that errors recommend: it takes any method. Most others stand for a single one.
GENERAL = "ROSU"

TRAINERS: dict[str, Alias] = {
    GENERAL: Alias("rosu", general=True),
    "ROSU_matched": Alias("rosu", general=True),
    "ROSURepresentation": Alias(
        "rosu",
        "rosu_llm.representation.trainer:RepresentationMixin",
        "rosu_llm.representation.config:RepresentationArguments",
        general=True,
    ),
    "MinMax": Alias("minmax"),
    "UAM": Alias("uam"),
    "UAMRelaxed": Alias("uam_relaxed"),
    "UAMReflected": Alias("uam_reflected"),
    "PCGrad": Alias("pcgrad"),
    "PCGradConflict": Alias("pcgrad_conflict"),
    "BLUR": Alias("blur"),
    "OrthoGrad": Alias("orthograd"),
    "GU": Alias("gu"),
    "NPOSAM": Alias("sam_npo"),
    "IdkNLL": Alias("graddiff"),
    "RetainFineTune": Alias("ft"),
    "LLMU": Alias("llmu"),
    "SCRUB": Alias("scrub"),
    "SSD": Alias("ssd"),
}


def trainer_module() -> Any:
    """OpenUnlearning's ``trainer`` package, recognised by its registry because its name is so common."""
    module = sys.modules.get("trainer")
    if not isinstance(getattr(module, "TRAINER_REGISTRY", None), dict) or not hasattr(module, "_register_trainer"):
        raise ConfigError(
            "OpenUnlearning's trainer registry (src/trainer, TRAINER_REGISTRY) is not loaded: start its src/train.py "
            "or src/eval.py, or 'python -m rosu_llm.openunlearning train …' inside its checkout."
        )
    return module


class Deferred:
    """A placeholder in the registry: the class is built when OpenUnlearning first calls it."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, **kwargs: Any) -> Any:
        register(wanted=self.__name__)
        return trainer_module().TRAINER_REGISTRY[self.__name__](**kwargs)


def offer() -> None:
    """Register a placeholder under every alias whose name is free; does nothing outside OpenUnlearning."""
    try:
        module = trainer_module()
    except ConfigError:
        return
    for name in TRAINERS:
        if name not in module.TRAINER_REGISTRY:
            module._register_trainer(Deferred(name))


def register(wanted: str | None = None) -> list[str]:
    """Register every alias whose name is free, and the losses we borrow; returns the names that lead to our classes.

    Safe to call again.

    Args:
        wanted: the trainer this job asks for. If it is one of ours and OpenUnlearning has another of that name, that is
            an error; a clash in a name nobody asked for is only logged.
    """
    from .bridge import FromOpenUnlearning, build_trainer
    from .losses import register_losses
    from .metrics import register_metrics

    module = trainer_module()
    register_losses()
    register_metrics()
    registered = []
    for name in TRAINERS:
        existing = module.TRAINER_REGISTRY.get(name)
        if existing is None or isinstance(existing, Deferred):
            module._register_trainer(build_trainer(name))
        elif not (isinstance(existing, type) and issubclass(existing, FromOpenUnlearning)):
            _report_clash(name, existing, wanted)
            continue
        registered.append(name)
    return registered


def _report_clash(name: str, existing: Any, wanted: str | None) -> None:
    where = f"{getattr(existing, '__module__', '?')}.{getattr(existing, '__qualname__', existing)}"
    if name != wanted:
        logger.info("OpenUnlearning has a trainer %r of its own (%s); ours is left out.", name, where)
        return
    other = f"use trainer={GENERAL} trainer.method_args.method={TRAINERS[name].method}"
    other = "rename or remove that one" if name == GENERAL else other
    raise ConfigError(f"OpenUnlearning already has a trainer called {name!r} ({where}), and it is not ours: {other}.")
