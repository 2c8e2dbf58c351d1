"""The methods by name: the values of ``method`` in the configuration, the command line and YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import unknown
from .descent import FineTune, GradDiff, NegativeGradient
from .jacobian_descent import PREFIX, TorchJD
from .minmax import MinMax, Uam, UamReflected, UamRelaxed
from .pcgrad import Blur, PCGrad, PCGradConflict
from .projection import Stabilizer
from .rosu import Rosu
from .rule import Rule
from .sharpness import SharpnessAware

Builder = Callable[[Mapping[str, Any]], Rule]

METHODS: dict[str, Builder] = {
    "rosu": lambda o: Rosu(o["jacobian"], Stabilizer(o["tau"], o["tau_mode"]), o["eps_q"], components=o["components"]),
    "minmax": lambda o: MinMax(o["jacobian"], o["eps_q"]),
    "uam": lambda o: Uam(eps_q=o["eps_q"]),
    "uam_relaxed": lambda o: UamRelaxed(eps_q=o["eps_q"]),
    "uam_reflected": lambda o: UamReflected(eps_q=o["eps_q"], reflection=o["reflection"]),
    "pcgrad": lambda o: PCGrad(o["forget_weight"], o["retain_weight"]),
    "pcgrad_conflict": lambda o: PCGradConflict(o["forget_weight"], o["retain_weight"]),
    "blur": lambda o: Blur(o["forget_weight"], o["retain_weight"]),
    "sam_npo": lambda o: SharpnessAware(o["forget_weight"], o["retain_weight"], o["eps_q"]),
    "graddiff": lambda o: GradDiff(o["forget_weight"], o["retain_weight"]),
    "ft": lambda o: FineTune(),
    "ng": lambda o: NegativeGradient(),
}

#: Options a rule may read, with the defaults of the paper.
DEFAULTS: dict[str, Any] = {
    "jacobian": "relaxed",
    "components": "full",
    "tau": 1e-8,
    "tau_mode": "absolute",
    "eps_q": 1e-6,
    "forget_weight": 1.0,
    "retain_weight": 1.0,
    "reflection": 2.0,
}


def build_rule(method: str, **options: Any) -> Rule:
    """The rule called ``method``, e.g. ``build_rule("rosu", jacobian="none")`` or ``build_rule("torchjd.UPGrad")``."""
    for name in options:
        if name not in DEFAULTS:
            raise unknown("method option", name, DEFAULTS)
    given = {**DEFAULTS, **options}
    if method.startswith(PREFIX):
        return TorchJD(given["forget_weight"], given["retain_weight"], method.removeprefix(PREFIX))
    if method not in METHODS:
        raise unknown("method", method, [*METHODS, f"{PREFIX}UPGrad"])
    return METHODS[method](given)
