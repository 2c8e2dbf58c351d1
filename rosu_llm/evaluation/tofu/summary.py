"""The paper's summary of a TOFU evaluation: Mem, Priv, Util, Agg and Agg_MU of one model.

    Mem    = HM(1−ES, 1−EM, 1−ParaProb, 1−TR)             TR = mean of p(true) / (p(true) + p(false))
    Priv   = HM(s_LOSS, s_ZLib, s_Min-k, s_Min-k++)       s: closeness of the attack's AUC to the retain model's
    Util   = HM(MU, Fluency), divided by the same of the initial model when that is known
    Agg    = HM(Mem, Priv, Util)        Agg_MU = HM(Mem, Util), the only one a model may be selected by

A figure that was not measured makes the columns built on it missing, and the summary says which; nothing is
replaced silently. Inputs are named as OpenUnlearning names its metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import ConfigError, DataError, unknown

TRUTH_RATIO = "forget_truth_ratio_prob_mean"
MODEL_UTILITY, FLUENCY = "model_utility", "forget_Q_A_gibberish"

MEMORISATION = {
    "ES": "extraction_strength",
    "EM": "exact_memorization",
    "ParaProb": "forget_Q_A_PARA_Prob",
    "TR": TRUTH_RATIO,
}
ATTACKS = {
    "LOSS": "mia_loss",
    "ZLib": "mia_zlib",
    "Min-k": "mia_min_k",
    "Min-k++": "mia_min_k_plus_plus",
}
INPUTS = (*MEMORISATION.values(), *ATTACKS.values(), MODEL_UTILITY, FLUENCY)
COLUMNS = ("Agg", "Agg_MU", "Mem", "Priv", "Util")

Figures = Mapping[str, float]


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


class Closeness(NamedTuple):
    """One way to turn an attack's AUC into a score in [0, 1]: 1 − |a − r| / scale, clipped at 0."""

    formula: str  # as it is printed under a table
    scale: Callable[[float, float], float]  # from the AUCs of the retain and the initial model
    needs_target: bool = False  # whether the initial model's AUC enters


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


@dataclass(frozen=True)
class TofuSummary:
    """The five scores in [0, 1] (Util relative to the initial model may exceed 1), None where inputs are missing."""

    mem: float | None = None
    priv: float | None = None
    util: float | None = None
    util_raw: float | None = None
    agg: float | None = None
    agg_mu: float | None = None
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # column → the inputs it still needs
    closeness: Mapping[str, float] = field(default_factory=dict)  # s of each attack, by its short name

    def columns(self) -> dict[str, float | None]:
        """The scores under the names the paper's tables use."""
        return dict(zip(COLUMNS, (self.agg, self.agg_mu, self.mem, self.priv, self.util), strict=True))


def summarise(
    figures: Figures,
    *,
    retain: Figures | None = None,
    target: Figures | None = None,
    transform: str = "range",
    with_fluency: bool = True,
) -> TofuSummary:
    """Summarise one model's figures.

    Args:
        figures: metric name → value of the model.
        retain: the same of the model that never saw the forget set; Priv needs its attacks' AUCs.
        target: the same of the initial model; Util is relative to it when given (``span`` needs its AUCs, too).
        transform: one of ``AUC_TRANSFORMS``.
        with_fluency: False leaves fluency out of Util; mention that wherever the result is shown.
    """
    missing = {"Mem": _absent(MEMORISATION.values(), figures)}
    mem = None if missing["Mem"] else harmonic_mean(1 - figures[name] for name in MEMORISATION.values())
    closeness, missing["Priv"] = _closeness(figures, retain, target, transform)
    priv = harmonic_mean(closeness.values()) if closeness else None
    util_raw, util, missing["Util"] = _utility(figures, target, with_fluency)
    scores = {"Mem": mem, "Priv": priv, "Util": util}
    agg, missing["Agg"] = _combine(scores, "Mem", "Priv", "Util")
    agg_mu, missing["Agg_MU"] = _combine(scores, "Mem", "Util")
    missing = {column: names for column, names in missing.items() if names}
    return TofuSummary(mem, priv, util, util_raw, agg, agg_mu, missing, closeness)


def _closeness(
    figures: Figures, retain: Figures | None, target: Figures | None, transform: str
) -> tuple[dict[str, float], tuple[str, ...]]:
    needs_target = auc_transform(transform).needs_target
    lacking = _absent(ATTACKS.values(), figures) + _absent(ATTACKS.values(), retain, "the retain model")
    if needs_target:
        lacking += _absent(ATTACKS.values(), target, "the initial model")
    if lacking or retain is None:
        return {}, lacking
    initial = target if needs_target and target is not None else {}
    return {
        short: auc_closeness(figures[name], retain[name], transform=transform, target=initial.get(name))
        for short, name in ATTACKS.items()
    }, ()


def _utility(
    figures: Figures, target: Figures | None, with_fluency: bool
) -> tuple[float | None, float | None, tuple[str, ...]]:
    """Util as measured, Util as it enters the aggregates, and the inputs the latter still needs."""
    parts = (MODEL_UTILITY, FLUENCY) if with_fluency else (MODEL_UTILITY,)
    lacking = _absent(parts, figures)
    raw = None if lacking else harmonic_mean(figures[name] for name in parts)
    if target is None:
        return raw, raw, lacking
    lacking += _absent(parts, target, "the initial model")
    if raw is None or lacking:
        return raw, None, lacking
    scale = harmonic_mean(target[name] for name in parts)
    return (raw, raw / scale, ()) if scale > 0 else (raw, None, ("an initial model whose Util is not 0",))


def _combine(scores: Mapping[str, float | None], *columns: str) -> tuple[float | None, tuple[str, ...]]:
    known = [value for value in map(scores.__getitem__, columns) if value is not None]
    if len(known) < len(columns):
        return None, tuple(column for column in columns if scores[column] is None)
    return harmonic_mean(known), ()


def _absent(names: Iterable[str], figures: Figures | None, whose: str = "") -> tuple[str, ...]:
    """Those of ``names`` that are missing; a single entry if the model has no results at all."""
    if figures is None:
        return (f"the results of {whose}",)
    return tuple(f"{name} of {whose}" if whose else name for name in names if name not in figures)
