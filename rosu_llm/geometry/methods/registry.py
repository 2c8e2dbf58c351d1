"""The methods by name: the values of ``method`` in the configuration, the command line and YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ConfigError, unknown
from ..projection import Stabilizer
from ..subspace import Protection
from .base import Rule
from .descent import FineTune, GradDiff, NegativeGradient
from .gu import GU
from .minmax import MinMax, Uam, UamReflected, UamRelaxed
from .orthograd import OrthoGrad
from .pcgrad import Blur, PCGrad, PCGradConflict
from .rosu import Rosu
from .rosu_subspace import SubspaceRosu
from .sam_npo import SharpnessAware
from .torchjd import PREFIX, TorchJD

Builder = Callable[[Mapping[str, Any]], Rule]

#: Sampled retain gradients of the methods that are made of them, where ``protect_rank`` is not given.
SAMPLES = 8


def _rosu(o: Mapping[str, Any]) -> Rosu:
    """Rank one is Algorithm 1: the mean retain gradient, stabilised by τ."""
    common: dict[str, Any] = {"jacobian": o["jacobian"], "eps_q": o["eps_q"], "components": o["components"]}
    stabilizer = Stabilizer(o["tau"], o["tau_mode"])
    rank = _rank(o, 1)
    if rank == 1 and o["metric"] == "euclidean":
        return Rosu(stabilizer=stabilizer, **common)
    protection = Protection(rank, o["include_mean"]) if rank > 1 else Protection()
    return SubspaceRosu(protection=protection, metric=o["metric"], **common)


def _samples(o: Mapping[str, Any]) -> Protection:
    return Protection(_rank(o, SAMPLES), o["include_mean"])


def _rank(o: Mapping[str, Any], default: int) -> int:
    rank = default if o["protect_rank"] is None else o["protect_rank"]
    if not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"protect_rank={rank!r} is no number of retain directions: give a whole number ≥ 1.")
    return rank


METHODS: dict[str, Builder] = {
    "rosu": _rosu,
    "minmax": lambda o: MinMax(o["jacobian"], o["eps_q"]),
    "uam": lambda o: Uam(eps_q=o["eps_q"]),
    "uam_relaxed": lambda o: UamRelaxed(eps_q=o["eps_q"]),
    "uam_reflected": lambda o: UamReflected(eps_q=o["eps_q"], reflection=o["reflection"]),
    "pcgrad": lambda o: PCGrad(o["forget_weight"], o["retain_weight"]),
    "pcgrad_conflict": lambda o: PCGradConflict(o["forget_weight"], o["retain_weight"]),
    "blur": lambda o: Blur(o["forget_weight"], o["retain_weight"]),
    "sam_npo": lambda o: SharpnessAware(o["forget_weight"], o["retain_weight"], o["eps_q"]),
    "orthograd": lambda o: OrthoGrad(_samples(o), o["orthograd_alpha"]),
    "gu": lambda o: GU(_samples(o), o["metric"]),
    "graddiff": lambda o: GradDiff(o["forget_weight"], o["retain_weight"]),
    "ft": lambda o: FineTune(),
    "ng": lambda o: NegativeGradient(),
}

#: Other names, for those who do not unlearn: a fine-tuned model is one with nothing to forget.
ALIASES = {"finetune": "ft"}

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
    "protect_rank": None,
    "include_mean": False,
    "orthograd_alpha": 0.5,
    "metric": "euclidean",
}

#: Options that would silently do nothing elsewhere.
ONLY: dict[str, tuple[str, ...]] = {
    "protect_rank": ("rosu", "orthograd", "gu"),
    "include_mean": ("rosu", "orthograd", "gu"),
    "metric": ("rosu", "gu"),
}


def build_rule(method: str, **options: Any) -> Rule:
    """The rule called ``method``, e.g. ``build_rule("rosu", jacobian="none")`` or ``build_rule("torchjd.UPGrad")``."""
    for name in options:
        if name not in DEFAULTS:
            raise unknown("method option", name, DEFAULTS)
    method = ALIASES.get(method, method)
    given = {**DEFAULTS, **options}
    for name, methods in ONLY.items():
        if given[name] != DEFAULTS[name] and method not in methods:
            raise ConfigError(
                f"{name}={given[name]!r} does nothing for method={method!r}: leave it out, or use one of "
                f"{', '.join(methods)}."
            )
    if method.startswith(PREFIX):
        return TorchJD(given["forget_weight"], given["retain_weight"], method.removeprefix(PREFIX))
    if method not in METHODS:
        raise unknown("method", method, [*METHODS, *ALIASES, f"{PREFIX}UPGrad"])
    return METHODS[method](given)
