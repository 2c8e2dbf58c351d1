"""Trainer names inside OpenUnlearning. Each is an alias: a method of the registry on top of a training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Alias:
    """What a trainer name stands for.

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


#: The alias for every method; all others but the one at representation level stand for one.
GENERAL = "ROSU"

TRAINERS: dict[str, Alias] = {
    GENERAL: Alias("rosu", general=True),
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
    "RetainFineTune": Alias("ft"),
}

#: Methods that OpenUnlearning has under a name of its own. Ours: ``trainer=ROSU trainer.method_args.method=…``.
NATIVE = {"graddiff": "GradDiff", "ng": "GradAscent"}
