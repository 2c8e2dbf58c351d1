"""Named sets of settings: ``preset`` of a recipe, or ``ROSUConfig(**PRESETS["paper"], …)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..geometry import METHODS
from ..losses import LOSSES

#: Settings with which nothing besides the method's own data is measured.
WITHOUT_UNSEEN: Mapping[str, Any] = {
    "calibrate": "off",
    "forget_until": "off",
    "forget_beyond": "leave",
    "forget_refresh": 0,
    "keep_best": "off",
    "budget": None,
    "budget_measure": "loss",
}

#: What turns any method into its bounded form: every answer and every token up to the level of unseen data.
BOUND: Mapping[str, Any] = {
    "forget_until": "holdout",
    "forget_level": "both",
    "forget_margin": 0.5,
    "forget_draw": False,
}

# The paper's language-model runs as it describes them (appendix, "ROSU recipe"), with the optimizer between the
# amplified gradient and the weights; learning rate and length belong to the task.
_PAPER: Mapping[str, Any] = {
    "method": "rosu",
    "rho": 0.4,
    "rho_schedule": "constant",
    "beta": "tied",
    "amplify": "optimizer",
    "fallback": "paper",
    **WITHOUT_UNSEEN,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper": _PAPER,
    # Ours, for pretrained models: the paper's steps, but what is as unlikely as unseen answers is left alone.
    "recommended": {**_PAPER, **BOUND},
    # Ours, chosen on the demo for models of its size, trained from scratch, which know their data by heart: a pull that
    # stays exactly retain-neutral, on all tokens alike, towards the level of unseen data from both sides, which follows
    # the model.
    "small": {
        "method": "rosu",
        "forget_loss": "odds",
        "rho": 2.4,
        "rho_schedule": "cosine",
        "amplify": "matched",
        "kappa": 0.3,
        **BOUND,
        "forget_level": "token",
        "forget_beyond": "reverse",
        "forget_refresh": 5,
    },
}


def with_named_loss(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with a method that is named after a forget loss (``npo``, ``altpo``, …) written out.

    Such a method is gradient difference with that loss.
    """
    name, given = values.get("method"), values.get("forget_loss")
    owned = {loss for rule in METHODS.values() for loss in rule.losses.values()}
    if not isinstance(name, str):  # refused with its field
        return dict(values)
    if name in METHODS or name in owned or name not in LOSSES or LOSSES[name].roles != ("forget",):
        return dict(values)
    if given not in (None, name):
        raise ConfigError(
            f"method={name!r} is gradient difference with forget_loss={name!r}, and forget_loss={given!r} is set too: "
            "leave one of them out, or combine a rule with that loss, e.g. method='rosu'."
        )
    return {**values, "method": "graddiff", "forget_loss": name}
