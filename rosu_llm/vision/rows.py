"""The rows of the paper's vision tables: what each method is, and what is tried for it.

Every row has eight trials: the same number for all, each with values of its own settings; fewer where the user fixes
some of these, and other ones where the user gives lists. Lengths are the paper's: ten
epochs for FT, NG and ℓ1-sparse, five for the others, none for FF and IU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from ..errors import ConfigError
from ..training.values import coerce
from .settings import given_values
from .splits import PROTOCOLS

#: Trials per row.
TRIALS = 8


@dataclass(frozen=True)
class TableRow:
    """A method of a table.

    Attributes:
        settings: what it is.
        searched: setting → values that are tried; of ``rho`` those for each protocol.
    """

    label: str
    settings: Mapping[str, Any]
    searched: Mapping[str, Any] = field(default_factory=dict)


_RHO = {"classwise": (0.1, 0.25, 0.5, 1.0), "random": (0.5, 1.0, 1.25, 2.0)}
#: How deep bounded rows forget: as unseen images, or until another class is likelier for sure.
_LEVEL = {"classwise": (4.0,), "random": ("holdout",)}
_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
_WIDE = (3e-4, 1e-3, 3e-3, 5e-3, 1e-2, 2e-2, 3e-2, 1e-1)
#: Of ascent; the larger ones are for small sets, whose epochs have few steps.
_ASCENT = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
_LONG = {"num_train_epochs": 10}

ROWS: dict[str, TableRow] = {
    "ft": TableRow("FT", {"method": "ft", **_LONG}, {"learning_rate": _WIDE}),
    "ng": TableRow("NG", {"method": "ng", **_LONG}, {"learning_rate": _ASCENT}),
    "ff": TableRow("FF", {"one_step": "ff"}, {"edit_strength": (1e-8, 3e-8, 1e-7, 3e-7, 1e-6, 2e-6, 4e-6, 1e-5)}),
    "iu": TableRow("IU", {"one_step": "iu"}, {"edit_strength": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)}),
    "l1_sparse": TableRow(
        "ℓ1-sparse", {"method": "ft", "l1": 1e-5, **_LONG}, {"learning_rate": _RATES, "l1": (1e-5, 1e-4)}
    ),
    "gu": TableRow("GU", {"method": "gu"}, {"learning_rate": tuple(r / 10.0 for r in _WIDE)}),
    "orthograd": TableRow(
        "OrthoGrad", {"method": "orthograd"}, {"learning_rate": _RATES, "orthograd_alpha": (0.5, 0.9)}
    ),
    "pcgrad": TableRow("PCGrad", {"method": "pcgrad"}, {"learning_rate": _RATES, "forget_weight": (0.1, 1.0)}),
    "uam": TableRow("UAM", {"method": "uam"}, {"learning_rate": (1e-2, 3e-2), "rho": _RHO}),
    "rosu": TableRow("ROSU", {"method": "rosu"}, {"learning_rate": (1e-2, 3e-2), "rho": _RHO}),
    "rosu_bounded": TableRow(
        "ROSU, bounded*", {"method": "rosu"}, {"learning_rate": (1e-2, 3e-2), "rho": _RHO, "forget_until": _LEVEL}
    ),
    "rosu_zero_order": TableRow(
        "ROSU, zero-order", {"method": "rosu", "jacobian": "none"}, {"learning_rate": (1e-2, 3e-2), "rho": _RHO}
    ),
    "minmax": TableRow("min–max", {"method": "minmax"}, {"learning_rate": (1e-2, 3e-2), "rho": _RHO}),
    "graddiff": TableRow("GradDiff", {"method": "graddiff"}, {"learning_rate": _RATES, "forget_weight": (0.1, 1.0)}),
}
_SEARCHED = {key for row in ROWS.values() for key in row.searched}
#: Those of the paper's tables, in their order.
PAPER_ROWS = ("ft", "ng", "ff", "iu", "l1_sparse", "gu", "orthograd", "pcgrad", "uam", "rosu")


def given_settings(values: Mapping[str, Any], names: Sequence[str], *, search: bool = False) -> dict[str, Any]:
    """What the user's settings fix in rows that would set or search it themselves.

    With ``search``, a list of values of a searched setting becomes a tuple: what is tried in place of the rows' own.
    """
    for key in ("method", "one_step"):
        if key in values:
            raise ConfigError(f"{key}={values[key]!r} is a row of its own here: write --methods NAME ….")
    searched = {key for name in names for key in ROWS[name].searched}
    own = {key for name in names for key in ROWS[name].settings} | searched
    listed = {key: value for key, value in values.items() if key in _SEARCHED and str(value)[:1] == "["}
    for key, value in listed.items():
        if not search or key not in searched:
            raise ConfigError(
                f"{key}={value} has several values, which only rosu vision table tries, in rows that search {key}: "
                "give one here."
            )
    several: dict[str, list[Any]] = {key: coerce(key, value, list) for key, value in listed.items()}
    fixed = given_values({key: value for key, value in values.items() if key in own and key not in several})
    for key, tried in several.items():
        if not tried:
            raise ConfigError(f"{key}=[] leaves nothing to try: give values, or leave it out for the rows' own.")
        fixed[key] = tuple(dict.fromkeys(given_values({key: value})[key] for value in tried))
    for name in names:
        for protocol in PROTOCOLS:
            count = prod(len(axis) for axis in _axes(name, protocol, fixed)[0].values())
            if count > TRIALS:
                raise ConfigError(
                    f"The given lists make {count} combinations for {name}, and a method has {TRIALS} trials: give "
                    "fewer values."
                )
    return fixed


def default_settings(name: str, protocol: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A row's settings without a search: the middle of what would be tried; ``given`` as in :func:`trials`."""
    axes, fixed = _axes(name, protocol, given)
    return {**fixed, **{key: values[len(values) // 2] for key, values in axes.items()}}


def check_trials(count: int) -> None:
    """Raise for a number of trials that rows do not have; none is a table without a search."""
    if not 0 <= count <= TRIALS:
        raise ConfigError(f"--trials {count}: every method has {TRIALS}, so give 1 to {TRIALS}, or 0 for no search.")


def trials(
    name: str, protocol: str, count: int = TRIALS, given: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The settings to try, spread evenly over the row's combinations of values.

    What is ``given`` is in all of them and not varied; a tuple is tried in place of the row's own values.
    """
    check_trials(count)
    axes, fixed = _axes(name, protocol, given)
    every = [{**fixed, **dict(zip(axes, values, strict=True))} for values in product(*axes.values())]
    count = min(count, len(every))
    picked = [round(i * (len(every) - 1) / (count - 1)) for i in range(count)] if count > 1 else [len(every) // 2]
    return [every[i] for i in picked]


def _axes(name: str, protocol: str, given: Mapping[str, Any] | None) -> tuple[dict[str, Sequence[Any]], dict[str, Any]]:
    """What is varied in a row, with its values, and what is fixed."""
    row, given = ROWS[name], given or {}
    axes: dict[str, Sequence[Any]] = {}
    for key, values in row.searched.items():
        own = values[protocol] if isinstance(values, Mapping) else values
        if not (key in given and not isinstance(given[key], tuple)):
            axes[key] = given.get(key, own)
    fixed = {key: value for key, value in given.items() if not isinstance(value, tuple)}
    return axes, {**row.settings, **fixed}
