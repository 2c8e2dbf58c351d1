"""The numbers of one step under the names they are logged by (glossary in docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt

from ..geometry import F, Gram, R, Stabilizer, cosine, retain_orthogonal
from ..geometry.slots import FORGET, PRECONDITIONED, RETAIN
from ..geometry.vector import P
from .engine import Outcome
from .pull import Pull


def metrics(outcome: Outcome, stabilizer: Stabilizer | None = None) -> dict[str, float]:
    """``group/name`` → value, for whatever the step computed."""
    values = {f"loss/{name}": value for name, value in outcome.losses.items()}
    gram = outcome.gram
    known = gram.names
    if outcome.skipped:
        return values
    if FORGET in known:
        values["norm/forget"] = gram.norm(F)
    if RETAIN in known:
        values["norm/retain_sq"] = gram(R, R)
        if stabilizer is not None:
            values["coupling/residue"] = stabilizer.residue(gram(R, R))
    if {FORGET, RETAIN} <= known:
        values["coupling/cosine"] = cosine(gram)
    if outcome.protected is not None and RETAIN in known:
        values["subspace/rank"] = float(outcome.protected.rank)
        values["subspace/retain_outside"] = outcome.protected.share_outside(R)
    if gram.dual is not None and PRECONDITIONED in known:
        values.update(_neutrality(gram, gram.dual))
    if outcome.inner is not None:
        values["norm/q"] = outcome.inner.direction_norm
        values["step/alpha"] = outcome.inner.alpha
        values["step/fallback"] = float(outcome.inner.fallback)
    if outcome.realized is not None:
        values["perturb/norm"] = outcome.realized.norm
        values["perturb/realized"] = outcome.realized.fraction
        values["perturb/distortion"] = outcome.realized.distortion
        values["coupling/leak"] = outcome.realized.leak
    if outcome.amplification_ratio is not None:
        values["step/amplification_ratio"] = outcome.amplification_ratio
    return values


def _neutrality(gram: Gram, dual: Gram) -> dict[str, float]:
    """cos(r, q) in the optimizer's metric, 0 where what the optimizer makes of q is retain-neutral.

    For q as it was projected (from the D⁻¹q that is added to the weights), and for the Euclidean q.
    """
    size, square = dual.norm(R), gram.dot(F, P)  # ⟨f, D⁻¹q⟩ = ⟨q, D⁻¹q⟩
    q = retain_orthogonal(F, gram, Stabilizer(0.0))
    norms = size * dual.norm(q)
    return {
        "metric/leak": gram.dot(R, P) / (size * sqrt(square)) if size > 0.0 and square > 0.0 else 0.0,
        "metric/leak_euclidean": dual.dot(R, q) / norms if norms > 0.0 else 0.0,
    }


def pull_metrics(pull: Pull) -> dict[str, float]:
    """The same for the pull after the optimizer step."""
    return {"step/amplification_ratio": pull.ratio}


#: What the mean over several steps would hide from an audit of the safeguards τ and ε_q.
_EXTREMES: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
    "norm/retain_sq": ("norm/retain_sq_min", min),
    "norm/q": ("norm/q_min", min),
    "coupling/residue": ("coupling/residue_max", max),
    "step/fallback": ("step/fallbacks", sum),
}


def over_steps(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Means over the steps a log covers; of several steps also the smallest norms and the number of fallbacks."""
    result = {name: sum(v) / len(v) for name, v in sorted(values.items())}
    for name, (other, reduce) in _EXTREMES.items():
        if len(values.get(name, ())) > 1:
            result[other] = reduce(values[name])
    return result
