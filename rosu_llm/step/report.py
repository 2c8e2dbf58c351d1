"""The numbers of one step under the names they are logged by (glossary in the README)."""

from __future__ import annotations

from ..geometry import F, R, Stabilizer, cosine
from .amplify import Pull
from .engine import Outcome


def metrics(outcome: Outcome, stabilizer: Stabilizer | None = None) -> dict[str, float]:
    """``group/name`` → value, for whatever the step computed."""
    values = {f"loss/{name}": value for name, value in outcome.losses.items()}
    gram = outcome.gram
    known = {name for pair in gram.products for name in pair}
    if outcome.skipped:
        return values
    if "f" in known:
        values["norm/forget"] = gram.norm(F)
    if "r" in known:
        values["norm/retain_sq"] = gram(R, R)
        if stabilizer is not None:
            values["coupling/residue"] = stabilizer.residue(gram(R, R))
    if {"f", "r"} <= known:
        values["coupling/cosine"] = cosine(gram)
    if outcome.inner is not None:
        values["norm/q"] = outcome.inner.direction_norm
        values["step/alpha"] = outcome.inner.alpha
        values["step/fallback"] = float(outcome.inner.fallback)
    if outcome.realized is not None:
        values["perturb/norm"] = outcome.realized.norm
        values["perturb/realized"] = outcome.realized.fraction
        values["perturb/distortion"] = outcome.realized.distortion
        values["coupling/leak"] = outcome.realized.leak
    if outcome.amplified.coefficients:
        size = gram.norm(outcome.vector)
        values["step/amplification_ratio"] = gram.norm(outcome.amplified) / size if size > 0.0 else 0.0
    return values


def pull_metrics(pull: Pull) -> dict[str, float]:
    """The same for the pull after the optimizer step."""
    return {"step/amplification_ratio": pull.ratio}
