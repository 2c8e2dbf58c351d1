"""The space of a search: any settings of ``rosu train``, each a list of choices or a range.

    method: [rosu, uam]                                 choices
    learning_rate: {low: 1e-6, high: 1e-4, log: true}   range, whole numbers where the setting takes only those
    num_train_epochs: {low: 2, high: 10, step: 2}       2, 4, … 10

On a command line: ``method=rosu,uam``, ``learning_rate=1e-6..1e-4:log``, ``num_train_epochs=2..10:2``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import floor, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, RosuError
from ...files import find_file
from ...recipes.settings import WITHOUT_OUTPUT, build, read_config
from ..config_task import typed_setting

if TYPE_CHECKING:
    from optuna.trial import Trial

_DATA = (
    "model_name_or_path forget_data retain_data holdout_data refusals alternates chat_format limit "
    "question_key answer_key text_key max_length min_length"
).split()
#: What a search cannot vary, and why or what to do instead.
RESERVED = {
    "seed": "every trial has the same one; pass --seed N",
    "output_dir": "trials lie below --out DIR",
    **dict.fromkeys(
        _DATA, "it changes what is measured, and trials would have no common Agg_MU; run one sweep for each"
    ),
    **dict.fromkeys(WITHOUT_OUTPUT, "it is the same for every trial"),
}


@dataclass(frozen=True)
class SearchAxis:
    """One setting: ``choice`` among ``choices``, or an ``int`` or ``float`` between ``low`` and ``high``."""

    key: str
    kind: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None

    def suggest(self, trial: Trial) -> Any:
        """The value Optuna chose for a trial."""
        if self.kind == "choice":
            return trial.suggest_categorical(self.key, self.choices)
        if self.kind == "int":
            step = int(self.step or 1)
            return trial.suggest_int(self.key, int(self.low), int(self.high), step=step, log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log)

    def values(self) -> list[Any]:
        """All values, for a search of every combination."""
        if self.kind == "choice":
            return list(self.choices)
        step = self.step or (1 if self.kind == "int" and not self.log else None)
        if step is None:
            raise ConfigError(f"--sampler grid cannot try all values of {self.key}: give it a list or a step.")
        return [self.low + i * step for i in range(floor((self.high - self.low) / step + 1e-9) + 1)]

    def bounds(self) -> tuple[Any, ...]:
        """The values that stand for all when settings are checked."""
        return self.choices or (self.low, self.high)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        if self.kind == "choice":
            return {"kind": self.kind, "choices": list(self.choices)}
        return {"kind": self.kind, "low": self.low, "high": self.high, "log": self.log, "step": self.step}


@dataclass(frozen=True)
class Space:
    """Axes in the order they were given."""

    axes: tuple[SearchAxis, ...]

    def suggest(self, trial: Trial) -> dict[str, Any]:
        """The trial's values."""
        return {axis.key: axis.suggest(trial) for axis in self.axes}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {axis.key: axis.as_dict() for axis in self.axes}


def read_space(path: str | Path | None, entries: Iterable[str], base: Mapping[str, Any]) -> Space:
    """The space of a file and of ``--set`` entries, every key and bound checked against the settings ``base``.

    Values can depend on each other (only some methods can be calibrated): each is checked together with the first
    values of all other keys.
    """
    if path and find_file(path) is None:
        raise ConfigError(
            f"--space {str(path)!r} is not a file: give a YAML file of 'key: [a, b]' lines, or use --set."
        )
    raw = read_config(path) if path else {}
    for entry in entries:
        key, value = _short(entry)
        if key in raw:
            raise ConfigError(f"{key} is in the space twice: leave out --set {entry} or the other.")
        raw[key] = value
    if not raw:
        raise ConfigError("Nothing to search: give --space FILE, or --set rho=0.1..0.8 --set method=rosu,uam.")
    axes = tuple(_axis(key, value, base) for key, value in raw.items())
    first = {**base, **WITHOUT_OUTPUT, "output_dir": "unused", **{axis.key: axis.bounds()[0] for axis in axes}}
    for axis in axes:
        for value in axis.bounds():
            try:
                build({**first, axis.key: value})
            except RosuError as error:
                raise ConfigError(f"The space cannot be searched at {axis.key} = {value}: {error}") from None
    return Space(axes)


def _short(entry: str) -> tuple[str, Any]:
    """``key=low..high``, ``key=low..high:log``, ``key=low..high:step`` or ``key=a,b,c``."""
    key, equals, text = entry.partition("=")
    key = key.strip().lstrip("-").replace("-", "_")
    if not (key and equals and text.strip()):
        raise ConfigError(f"--set {entry!r} is not understood: write key=a,b,c or key=low..high or key=low..high:log.")
    if ".." not in text or "," in text or "/" in text:  # a path may hold two dots
        choices = [part.strip() for part in text.split(",")]
        if "" in choices:
            raise ConfigError(f"--set {entry!r} has an empty choice between its commas: write {key}=a,b,c.")
        return key, choices
    low, _, rest = text.partition("..")
    high, colon, how = (part.strip() for part in rest.partition(":"))
    bounds = {"low": low.strip(), "high": high}
    if not colon:
        return key, bounds
    if how == "log":
        return key, {**bounds, "log": True}
    try:
        float(how)
    except ValueError:
        raise ConfigError(
            f"--set {entry!r} ends in {how!r}, which is neither log nor a step: write {key}={low}..{high} for even "
            f"spacing, {key}={low}..{high}:log or {key}={low}..{high}:STEP."
        ) from None
    return key, {**bounds, "step": how}


def _axis(key: str, value: Any, base: Mapping[str, Any]) -> SearchAxis:
    if key in RESERVED:
        raise ConfigError(f"{key} is nothing to search: {RESERVED[key]}.")
    if isinstance(value, list):
        typed = [typed_setting(key, entry, base) for entry in value]
        # Lists and mappings as text, which settings are read from just as well.
        choices = tuple(json.dumps(entry) if isinstance(entry, (list, dict)) else entry for entry in typed)
        if not choices:
            raise ConfigError(f"{key}: [] has no choice. List the values to try.")
        if len(set(map(repr, choices))) < len(choices):
            raise ConfigError(f"{key}: {value} has a choice twice.")
        return SearchAxis(key, "choice", choices)
    if not isinstance(value, dict) or not {"low", "high"} <= value.keys() <= {"low", "high", "log", "step"}:
        raise ConfigError(
            f"{key}: {value!r} is no space. Write a list such as [0.1, 0.2], or "
            "{low: 0.1, high: 0.8} with log: true or step: 0.1."
        )
    low, high = (_number(key, value[name], base) for name in ("low", "high"))
    kind = "int" if isinstance(low, int) and isinstance(high, int) else "float"
    step = _number(key, value["step"], base) if value.get("step") is not None else None
    log = str(value.get("log", False)).lower() in ("true", "yes", "on")
    reach = high - low
    for wrong, problem in (
        (not (isfinite(low) and isfinite(high)), "has a bound that is not finite."),
        (low >= high, "has low ≥ high: there is nothing between them."),
        (log and low <= 0, "is logarithmic, so low must be above 0."),
        (log and step is not None, "has both log and step: give one of them."),
        (step is not None and not 0 < step <= reach, f"has step {step}: it must be above 0 and at most high − low."),
    ):
        if wrong:
            raise ConfigError(f"{key}: {value!r} {problem}")
    return SearchAxis(key, kind, low=low, high=high, log=log, step=step)


def _number(key: str, value: Any, base: Mapping[str, Any]) -> int | float:
    typed = typed_setting(key, value, base)
    if isinstance(typed, bool) or not isinstance(typed, (int, float)):
        raise ConfigError(f"{key} has no range, as its values are no numbers: write a list of choices, [a, b].")
    with suppress(ConfigError):  # of settings that take no fractions
        if isinstance(typed_setting(key, 0.5, base), float):
            return float(typed)
    return typed
