"""Which parameters are trained, where it is not all of them (``trainable_parameters``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from ..errors import ConfigError


def train_only(model: Any, pattern: str) -> list[str]:
    """Freeze all parameters but those whose name ``pattern`` finds (``re.search``); returns their names."""
    expression = compile_pattern("trainable_parameters", pattern)
    names = [name for name, _ in model.named_parameters()]
    chosen = [name for name in names if expression.search(name)]
    if not chosen:
        raise ConfigError(
            f"trainable_parameters={pattern!r} matches no parameter. The nearest are {nearest(pattern, names)}."
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return chosen


def compile_pattern(setting: str, pattern: str) -> re.Pattern[str]:
    """A regular expression, or an error that names the setting."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{setting}={pattern!r} is not a regular expression: {error}.") from error


def nearest(pattern: str, names: Sequence[str]) -> str:
    """The names that are most like what a pattern may have meant."""
    plain = re.sub(r"[\\^$()?]", "", pattern)
    near = get_close_matches(plain, names, n=4, cutoff=0.3) or list(names[:4])
    return ", ".join(near) if near else "none: the model has no parameter in its layers"
