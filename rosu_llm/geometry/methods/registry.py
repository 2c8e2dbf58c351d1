"""The methods by name: the values of ``method`` in the configuration, the command line and YAML."""

from __future__ import annotations

from dataclasses import Field
from typing import Any

from ...errors import ConfigError, unknown
from .base import BaseRule
from .forget_only import ForgetOnly
from .graddiff import FineTune, GradDiff, NegativeGradient
from .gu import GU
from .minmax import MinMax
from .orthograd import OrthoGrad
from .others.llmu import LLMU
from .others.scrub import Scrub
from .others.ssd import SSD
from .pcgrad import Blur, PCGrad, PCGradConflict
from .rosu_subspace import SubspaceRosu
from .sam_npo import SharpnessAware
from .torchjd import PREFIX, TorchJD
from .uam import Uam, UamReflected, UamRelaxed

METHODS: dict[str, type[BaseRule]] = {
    "rosu": SubspaceRosu,  # of rank one: Rosu
    "minmax": MinMax,
    "uam": Uam,
    "uam_relaxed": UamRelaxed,
    "uam_reflected": UamReflected,
    "pcgrad": PCGrad,
    "pcgrad_conflict": PCGradConflict,
    "blur": Blur,
    "sam_npo": SharpnessAware,
    "orthograd": OrthoGrad,
    "gu": GU,
    "graddiff": GradDiff,
    "ft": FineTune,
    "ng": NegativeGradient,
    "forget_only": ForgetOnly,
    "llmu": LLMU,
    "scrub": Scrub,
    "ssd": SSD,
}

#: Other names, for those who do not unlearn: a fine-tuned model is one with nothing to forget.
ALIASES = {"finetune": "ft"}

#: Every option that some method declares, by name.
OPTIONS: dict[str, Field[Any]] = {
    name: declared for rule in reversed(METHODS.values()) for name, declared in rule.options().items()
}


def find_rule(method: str) -> type[BaseRule] | None:
    """The rule that ``build_rule`` makes, if there is one of that name."""
    method = ALIASES.get(method, method)
    return TorchJD if method.startswith(PREFIX) else METHODS.get(method)


def build_rule(method: str, **options: Any) -> BaseRule:
    """The rule called ``method``, e.g. ``build_rule("rosu", jacobian="none")`` or ``build_rule("torchjd.UPGrad")``.

    An option that the method does not have is ignored, unless it is exclusive to others and is not at its default.
    """
    for name in options:
        if name not in OPTIONS:
            raise unknown("method option", name, OPTIONS)
    rule = find_rule(method)
    if rule is None:
        raise unknown("method", method, [*METHODS, *ALIASES, f"{PREFIX}UPGrad"])
    own = rule.options()
    for name, value in options.items():
        if name not in own and OPTIONS[name].metadata["exclusive"] and value != OPTIONS[name].default:
            having = ", ".join(other for other, known in METHODS.items() if name in known.options())
            raise ConfigError(
                f"{name}={value!r} does nothing for method={method!r}: leave it out, or use one of {having}."
            )
    chosen = {name: value for name, value in options.items() if name in own}
    if rule is TorchJD:
        return TorchJD(name=method.removeprefix(PREFIX), **chosen)
    return rule.build(**chosen)
