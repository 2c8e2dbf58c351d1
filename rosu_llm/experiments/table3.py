"""The paper's Table 3 (language, TOFU) as a comparison of ours: every row the same number of trials, one budget.

A row is a contestant (:data:`~rosu_llm.experiments.contest.CONTESTANTS`); adding one is a line there and one here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError, unknown
from .contest import CONTESTANTS, Contest

#: Row of the paper's table → contestant, in its order.
ROWS: dict[str, str] = {
    "GradDiff": "graddiff",
    "NPO": "npo",
    "IdkDPO": "idk_dpo",
    "AltPO": "altpo",
    "PCGrad": "pcgrad",
    "IdkNLL": "idk_nll",
    "UNDIAL": "undial",
    "SimNPO": "simnpo_published",
    "UAM": "uam",
    "RMU": "rmu",
    "ROSU": "rosu_paper",
}
#: Rows that the table has not.
BESIDES: dict[str, str] = {"WGA": "wga", "SatImp": "satimp", "ROSU, matched pull": "rosu"}

#: Kind of task → the layer whose activations RMU moves: two thirds up, the middle one of the published three.
RMU_LAYER = {"demo": 2, "config": 10, "smoke": 0}

ALL = "all"
SEARCH_SEED = 10
#: Kind of task → what every row searches besides its own settings, how often, and on which seeds it is reported.
BUDGETS: dict[str, dict[str, Any]] = {
    "demo": {
        "common": {"learning_rate": (2e-4, 5e-4, 1e-3, 2e-3), "num_train_epochs": (10, 20, 40)},
        "trials": 6,
        "seeds": (0, 1, 2),
    },
    # as published for TOFU
    "config": {
        "common": {"learning_rate": (1e-5, 2e-5, 5e-5), "num_train_epochs": (5, 10)},
        "trials": 6,
        "seeds": (0,),
    },
    "smoke": {"common": {"learning_rate": (1e-3,), "num_train_epochs": (1,)}, "trials": 1, "seeds": (0,)},
}


def chosen_rows(names: Sequence[str]) -> dict[str, str]:
    """Row → contestant for names as they are typed: ``all``, rows of the table, or contestants."""
    known = {**ROWS, **BESIDES}
    by_lower = {one: row for row, one in known.items()} | {row.lower(): row for row in known}  # a row's name wins
    if list(names) == [ALL]:
        return known
    found: dict[str, str] = {}
    for name in names:
        if name.lower() in by_lower:
            row = by_lower[name.lower()]
            found[row] = known[row]
        elif name in CONTESTANTS:
            found[CONTESTANTS[name].label] = name
        else:
            raise unknown("method", name, [ALL, *known, *CONTESTANTS])
    return {row: found[row] for row in [*(r for r in known if r in found), *(r for r in found if r not in known)]}


def table_contest(
    rows: Mapping[str, str], kind: str, trials: int | None, seeds: Sequence[int] | None, files: Mapping[str, Any]
) -> Contest:
    """The comparison of the rows; ``files`` are alternates and refusals, which only some of them read."""
    budget, own = BUDGETS[kind], {}
    for name in rows.values():
        third = _third(name)
        if kind == "config" and third == "alternates" and not files.get("alternates"):
            raise ConfigError(
                f"{name} needs other answers to the questions: make them with 'rosu data alternates MODEL --data FILE "
                "--output FILE' and pass --alternates FILE, or name the other methods after --methods."
            )
        if files.get(third):
            own[name] = {third: files[third]}
        if name == "rmu":
            own[name] = {"target_layer": RMU_LAYER[kind]}
    return Contest(
        list(rows.values()), budget["common"], trials or budget["trials"], SEARCH_SEED, seeds or budget["seeds"], own
    )


def _third(name: str) -> str:
    from ..losses import get_loss
    from ..representation import losses  # noqa: F401  registers rmu

    return get_loss(str(CONTESTANTS[name].settings.get("forget_loss", "nll")), "forget").alternative
