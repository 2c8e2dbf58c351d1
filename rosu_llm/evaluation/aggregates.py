"""From single figures to scores: the harmonic mean with its zero rule, closeness of an attack to the retain model.

Plain floats in, plain floats out; who measured them and where they were stored is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import exp
from typing import NamedTuple

from ..errors import ConfigError, DataError, unknown


def harmonic_mean(values: Iterable[float]) -> float:
    """HM(a₁ … a_m) = m / Σ aᵢ⁻¹, and 0 as soon as one aᵢ is 0 (the paper's appendix on TOFU metrics).

    Valid for finite aᵢ ≥ 0; a value so small that its inverse overflows counts as 0.
    """
    numbers = list(values)
    if not numbers:
        raise DataError("A harmonic mean of no values does not exist.")
    for number in numbers:
        if not 0 <= number < float("inf"):
            raise DataError(f"A harmonic mean needs finite values ≥ 0, not {number}.")
    if min(numbers) == 0:
        return 0.0
    return len(numbers) / sum(1 / number for number in numbers)


def truth_probability(true_losses: Sequence[float], false_losses: Sequence[float]) -> float:
    """Mean over questions of p / (p + p′): p = exp(−mean token loss) of the true answer, p′ of the false ones.

    One loss per question on either side (of several false answers, the mean of their losses). This is the truth
    ratio as a degree of knowledge, 1 for a model that knows, not TOFU's p′/p.
    """
    if not true_losses or len(true_losses) != len(false_losses):
        raise DataError(f"{len(true_losses)} true and {len(false_losses)} false answers cannot be paired.")
    shares = [
        exp(-true) / (exp(-true) + exp(-false) + 1e-10)  # the same guard as OpenUnlearning's, for equal numbers
        for true, false in zip(true_losses, false_losses, strict=True)
    ]
    return sum(shares) / len(shares)


class Closeness(NamedTuple):
    """One way to turn an attack's AUC into a score in [0, 1]: 1 − |a − r| / scale, clipped at 0.

    Attributes:
        formula: as it is printed under a table.
        scale: the distance at which the score reaches 0, from the AUCs of the retain and the initial model.
        needs_target: whether the initial model's AUC enters.
    """

    formula: str
    scale: Callable[[float, float], float]
    needs_target: bool = False


# OpenUnlearning's authors did not publish theirs (its issue #172). 'range' is the one that gives the values of
# published tables for the initial model (close to 0, yet not 0) and the retain model (1).
AUC_TRANSFORMS = {
    "range": Closeness("s = max(0, 1 - |a-r| / max(r, 1-r))", lambda retain, _: max(retain, 1 - retain)),
    # As its metric rel_diff has it; its metric privleak divides by 1 − r, since it looks at 1 − AUC.
    "privleak": Closeness("s = max(0, 1 - |a-r| / r)", lambda retain, _: retain),
    "span": Closeness("s = max(0, 1 - |a-r| / |initial-r|)", lambda retain, target: abs(target - retain), True),
}


def auc_transform(name: str) -> Closeness:
    """The transform of this name, or an error that lists them."""
    if name not in AUC_TRANSFORMS:
        raise unknown("AUC transform", name, AUC_TRANSFORMS)
    return AUC_TRANSFORMS[name]


def auc_closeness(auc: float, retain: float, *, transform: str = "range", target: float | None = None) -> float:
    """How close the attack's AUC ``auc`` is to the retain model's: 1 when equal, 0 at the transform's scale.

    ``target`` is the AUC of the initial model, for ``span`` only. Where the scale is 0, only equality scores.
    """
    chosen = auc_transform(transform)
    if chosen.needs_target and target is None:
        raise ConfigError(f"AUC transform {transform!r} needs the initial model's AUC as well: give its results.")
    for value in (auc, retain, 0.0 if target is None else target):
        if not 0 <= value <= 1:
            raise DataError(f"An AUC lies between 0 and 1, not at {value}.")
    distance = abs(auc - retain)
    if distance == 0:
        return 1.0
    scale = chosen.scale(retain, 0.0 if target is None else target)
    return max(0.0, 1 - distance / scale) if scale > 0 else 0.0
