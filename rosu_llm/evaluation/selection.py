"""Which run of a method is shown: the one with the highest Agg_MU = HM(Mem, Util), and nothing else.

Privacy needs a model that never saw the forget set, which nobody has outside a benchmark; a selection that looked at it
would not be available to a user. So the functions here are handed Agg_MU only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..errors import DataError

# A trailing _lr1e-5, _rho0.4, _alpha2 …: what sweeps append to a method's name.
_SETTING = re.compile(r"[_-][A-Za-z]+[_=]?\d+(\.\d+)?(e[+-]?\d+)?$")


def method_of(label: str) -> str:
    """``ROSU_rho0.4_lr1e-5`` → ``ROSU``, for runs that left no record of their trainer."""
    label = label.split("/", 1)[0]
    while (shorter := _SETTING.sub("", label)) not in (label, ""):
        label = shorter
    return label


def best_by_agg_mu(methods: Sequence[str], agg_mu: Sequence[float | None]) -> dict[str, int]:
    """For each method, the position of its best run; the first one when several are equal.

    Runs without Agg_MU cannot win; a method with none that has it is an error.
    """
    best: dict[str, int] = {}
    for at, (method, value) in enumerate(zip(methods, agg_mu, strict=True)):
        if value is not None and (method not in best or value > (agg_mu[best[method]] or 0.0)):
            best[method] = at
    without = [method for method in dict.fromkeys(methods) if method not in best]
    if without:
        raise DataError(
            f"No run of {', '.join(without)} can be selected: Agg_MU is missing. Evaluate with "
            "+eval/tofu_metrics=[rosu_summary], or show all runs without selecting."
        )
    return best


def describe(best: Mapping[str, int], methods: Sequence[str], labels: Sequence[str]) -> str:
    """The sentence under a table of selected runs."""
    parts = [f"{method}: {labels[at]} (of {methods.count(method)})" for method, at in best.items()]
    return "Selected by the highest Agg_MU; no privacy figure was used. " + "; ".join(parts) + "."
