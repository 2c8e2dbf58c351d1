"""Adds our trainers to OpenUnlearning's registry.

Twice, because Hydra takes callbacks from the configuration *without* its sweep: a multirun over trainers
(``-m trainer=GradDiff,ROSU``) never sees the callback of ``trainer/ROSU.yaml``. So the search-path plugin first offers
every free name with an inert stand-in, and the callback, or the first call of a stand-in, puts the class in its place.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from ..errors import ConfigError
from .aliases import GENERAL, TRAINERS

logger = logging.getLogger(__name__)


def trainer_module() -> Any:
    """OpenUnlearning's ``trainer`` package, recognised by its registry rather than by so common a name."""
    module = sys.modules.get("trainer")
    if not isinstance(getattr(module, "TRAINER_REGISTRY", None), dict) or not hasattr(module, "_register_trainer"):
        raise ConfigError(
            "OpenUnlearning's trainer registry (src/trainer, TRAINER_REGISTRY) is not loaded: start its src/train.py "
            "or src/eval.py, or 'python -m rosu_llm.openunlearning train …' inside its checkout."
        )
    return module


class Deferred:
    """An entry of the registry that costs nothing until OpenUnlearning calls it."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, **kwargs: Any) -> Any:
        register(wanted=self.__name__)
        return trainer_module().TRAINER_REGISTRY[self.__name__](**kwargs)


def offer() -> None:
    """Put a stand-in under every alias whose name is free; nothing happens outside OpenUnlearning."""
    try:
        module = trainer_module()
    except ConfigError:
        return
    for name in TRAINERS:
        if name not in module.TRAINER_REGISTRY:
            module._register_trainer(Deferred(name))


def register(wanted: str | None = None) -> list[str]:
    """Register every alias whose name is free, and the losses we borrow; safe to call again.

    Args:
        wanted: the trainer this job asks for. If it is one of ours and OpenUnlearning has another of that name, that is
            an error; a clash in a name nobody asked for is only logged.

    Returns:
        the names that now lead to our classes.
    """
    from .bridge import build_trainer, is_ours
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
        elif not is_ours(existing):
            _report_clash(name, existing, wanted)
            continue
        registered.append(name)
    return registered


def _report_clash(name: str, existing: Any, wanted: str | None) -> None:
    where = f"{getattr(existing, '__module__', '?')}.{getattr(existing, '__qualname__', existing)}"
    if name != wanted:
        logger.info("OpenUnlearning has a trainer %r of its own (%s); ours is left out.", name, where)
        return
    other = (
        f"use trainer={GENERAL} trainer.method_args.method={TRAINERS[name].method}"
        if name != GENERAL
        else "rename or remove that one"
    )
    raise ConfigError(f"OpenUnlearning already has a trainer called {name!r} ({where}), and it is not ours: {other}.")
