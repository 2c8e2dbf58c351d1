"""``method_args`` of OpenUnlearning's configuration as typed, checked settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pkgutil import resolve_name
from typing import Any, get_type_hints

from ..errors import ConfigError, unknown
from ..losses import LOSSES
from ..training.config import MethodArguments
from ..training.values import coerce
from .registration import GENERAL, TRAINERS


@dataclass
class BridgeArguments(MethodArguments):
    """The method's settings plus those that only a loss we borrow has; defaults as in OpenUnlearning's own."""

    ceu_ignore_first: int = field(default=1, metadata={"help": "ceu: answer tokens left out at the start."})


#: Settings the bridge turns into objects before the trainer sees them.
HOLDOUT = "holdout_data"

#: Methods that OpenUnlearning has itself, by its names; for ours set ``trainer=ROSU trainer.method_args.method=…``.
NATIVE = {"graddiff": "GradDiff", "ng": "GradAscent"}

#: Methods that need data for which its configuration has no place.
APART = ("forget_only",)

#: What other trainers of OpenUnlearning call the same thing.
_ELSEWHERE = {
    "gamma": "forget_weight",
    "alpha": "retain_weight",
    "retain_loss_type": "retain_loss",
    "forget_loss_type": "forget_loss",
    "delta": "simnpo_delta",
    "steering_coeff": "steering",
    "module_regex": "target_layer",
    "trainable_params_regex": "trainable_parameters",
}

#: Spellings of OpenUnlearning's trainers that are not our loss name in capitals.
_LOSS_SPELLINGS = {"idkdpo": "dpo", "idk_dpo": "dpo", "gradascent": "nll", "graddiff": "nll"}


def read_method_args(trainer: str, given: Mapping[str, Any]) -> MethodArguments:
    """The settings of trainer alias ``trainer``, each value checked against its field."""
    alias = TRAINERS[trainer]
    kind: type[MethodArguments] = resolve_name(alias.arguments)
    hints = get_type_hints(kind)
    known = {f.name for f in fields(kind)}
    for key in (key for key in given if key not in known):
        if key in _ELSEWHERE:
            raise ConfigError(
                f"trainer={trainer} has no method_args {key!r}: what other trainers call {key} is "
                f"{_ELSEWHERE[key]!r} here. Check that no experiment sets it for another trainer."
            )
        raise unknown(f"method_args of trainer={trainer}", key, {*known, HOLDOUT})
    values = {key: coerce(key, value, hints[key]) for key, value in given.items()}
    for role in ("forget_loss", "retain_loss"):
        if role in values:
            # Our registry's lower-case name for OpenUnlearning's NLL, NPO, SimNPO, IdkDPO.
            lower = values[role].lower()
            lower = _LOSS_SPELLINGS.get(lower, lower)
            values[role] = lower if lower in LOSSES else values[role]
    if not alias.general and values.get("method", alias.method) != alias.method:
        raise ConfigError(
            f"trainer={trainer} stands for method={alias.method!r}, but method_args say {values['method']!r}: leave "
            f"the method out, or use trainer={GENERAL}."
        )
    settings = kind(**{"method": alias.method, **values})
    settings.check_method()
    return settings


def describe(settings: MethodArguments) -> str:
    """One line for the log: the method, and OpenUnlearning's own trainer where there is one."""
    text = f"method={settings.method} forget_loss={settings.forget_loss} retain_loss={settings.retain_loss}"
    native = NATIVE.get(settings.method)
    return f"{text} (OpenUnlearning's own: trainer={native})" if native else text
