"""What makes two cells the same: all of their settings, in one canonical form.

Problem: ``--rho 0.4``, ``rho: 0.4`` in a file and the default are one setting written in three ways; if each had a key
of its own, the row that several grids share would run several times. Solution: values take the type of their field,
the package's own settings are written out with their defaults, and those of ``TrainingArguments`` only where they
differ from theirs (its list of fields changes between versions of transformers).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments

from ..recipes.settings import WITHOUT_OUTPUT, RunArguments, type_values
from ..representation.config import RepresentationArguments, RepresentationConfig
from ..training.config import MethodArguments

#: Set for every cell: its result is a row of figures, so nothing is saved, evaluated or reported on the way.
FORCED = WITHOUT_OUTPUT

#: Without influence on the figures, or part of the key elsewhere.
_APART = {*FORCED, "seed", "output_dir", "overwrite", "save_steps", "save_total_limit", "logging_dir", "run_name"}


#: Fields that take a name or a number, and therefore hold numbers as text.
NAME_OR_NUMBER = ("beta", "calibrate")


def known_settings(values: Mapping[str, Any]) -> set[str]:
    """Names a grid may vary, for the kind of run that ``values`` describe."""
    chosen, _ = type_values(values)
    return {f.name for cls in (RunArguments, chosen) for f in dataclasses.fields(cls) if f.init}


def complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """The canonical settings; unknown names and values of the wrong type are refused, impossible ones are not."""
    chosen, typed = type_values(values)
    method = RepresentationArguments if issubclass(chosen, RepresentationConfig) else MethodArguments
    ours = {name: default for cls in (RunArguments, method) for name, default in _defaults(cls).items()}
    theirs = _defaults(TrainingArguments)
    result = dict(ours)
    for name, value in typed.items():
        default = ours.get(name, theirs.get(name))
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)  # YAML reads 1 as an integer
        if name in ours or value != default:
            result[name] = as_number(value) if name in NAME_OR_NUMBER else value
    return {name: value for name, value in sorted(result.items()) if name not in _APART}


def as_number(value: Any) -> Any:
    """Text that is a number as that number; anything else as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _defaults(cls: type) -> dict[str, Any]:
    result = {}
    for f in dataclasses.fields(cls):
        if f.default is not dataclasses.MISSING:
            result[f.name] = f.default
        elif f.default_factory is not dataclasses.MISSING:
            result[f.name] = f.default_factory()
    return result
