"""The error of one mini-batch pair: how far its retain-neutral direction is from neutral for the whole retain set.

With g = ∇L_r over all retain samples, and f, r the gradients of a forget and a retain mini-batch (paper, app:retain-
batch-size):

    q = f − ⟨f,r⟩/‖r‖² · r,   u = q/‖q‖,   ε_orth = |⟨g,u⟩|/‖g‖ = |cos(g, u)| ≤ ‖g − r‖/‖g‖.

The projector is exact, without τ: the audit is about the geometry of the constraint, not about its stabiliser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, DataError, NonFiniteError
from ...files import changed_conditions, write_atomically
from ...geometry import F, Gram, R, Stabilizer, Vector, retain_orthogonal
from .samples import OrthogonalityPlan

#: ∇L_r over the full retain set.
G = Vector.named("g")

#: ‖q‖/‖f‖ at or below which q is rounding error of float32 gradients and its direction means nothing.
DEGENERATE = 1e-6

#: Share of ‖g‖ by which rounding may lift the error above its bound.
ROUNDING = 1e-9

Key = tuple[int, int]  # retain batch size, pair


@dataclass(frozen=True)
class PairError:
    """One pair; relative figures are these divided by ‖g‖.

    Attributes:
        error: |⟨g,u⟩|; None where ``degenerate`` says why there is no u.
        bound: ‖g − r‖.
        degenerate: empty, ``retain`` (r = 0) or ``direction`` (q = 0).
    """

    error: float | None
    bound: float
    degenerate: str = ""


def pair_error(gram: Gram) -> PairError:
    """The figures of a pair from the Gram matrix of g, f and r."""
    for name, vector in (("full retain", G), ("forget", F), ("retain", R)):
        if not np.isfinite(gram(vector, vector)):
            raise NonFiniteError(
                f"The {name} gradient of a pair has NaN or infinite entries: check the weights and the data, or "
                "compute in float32."
            )
    bound = gram.norm(G - R)
    if gram(R, R) == 0.0:
        return PairError(None, bound, "retain")
    q = retain_orthogonal(F, gram, Stabilizer(0.0))
    size = gram.norm(q)
    if size <= DEGENERATE * gram.norm(F):
        return PairError(None, bound, "direction")
    return PairError(abs(gram.dot(G, q)) / size, bound)


def check_full(norm: float) -> None:
    """Raise if errors cannot be expressed relative to the full retain gradient."""
    if not np.isfinite(norm):
        raise NonFiniteError(
            f"The norm of the full retain gradient is {norm}: check the weights and the retain data, or use float32."
        )
    if norm == 0.0:
        raise DataError(
            "The full retain gradient is zero, so there is no direction to be orthogonal to: check the retain data and "
            "which parameters are trained."
        )


def cells(plan: OrthogonalityPlan, pairs: Mapping[Key, PairError], full_norm: float) -> list[dict[str, Any]]:
    """The distributions of every retain batch size; None where no pair has an error.

    ``degenerate`` counts pairs without an error, by the gradient that vanishes; ``violations`` errors above their bound
    (rounding aside). ``absolute`` figures are not divided by ‖g‖; ``samples`` holds the relative ones of every pair.
    """
    result: list[dict[str, Any]] = []
    for size in plan.sizes:
        found = [pairs[size, pair] for pair in range(plan.pairs)]
        used = [(pair.error, pair.bound) for pair in found if pair.error is not None]
        error, bound = (np.array([row[i] for row in used]) for i in (0, 1))
        result.append(
            {
                "retain_batch_size": size,
                "pairs": len(found),
                "used": len(used),
                "degenerate": {why: sum(pair.degenerate == why for pair in found) for why in ("retain", "direction")},
                "violations": int((error > bound + ROUNDING * full_norm).sum()),
                "eps_orth": summary(error / full_norm),
                "bound": summary(bound / full_norm),
                "absolute": summary(error),
                "absolute_bound": summary(bound),
                "samples": {"eps_orth": (error / full_norm).tolist(), "bound": (bound / full_norm).tolist()},
            }
        )
    return result


def summary(values: NDArray[np.float64]) -> dict[str, float] | None:
    """Percentiles, extremes and mean; None of nothing."""
    if len(values) == 0:
        return None
    found = np.percentile(values, (0, 5, 25, 50, 75, 95, 100)).tolist()
    names = ("min", "p5", "p25", "median", "p75", "p95", "max")
    return {**dict(zip(names, found, strict=True)), "mean": float(np.mean(values))}


def stored_conditions(path: Path) -> dict[str, Any] | None:
    """What the pairs in ``path`` were measured on; None where there is no such file."""
    if not path.is_file():
        return None
    with path.open(encoding="utf-8") as file:
        try:
            return dict(json.loads(file.readline())["conditions"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no record of an audit: move it away, or give another --out.") from error


class PairStore:
    """Measured pairs as JSON lines: appended one by one, so that a killed audit loses at most the pair in progress.

    The first line of the file says what they were measured on.

    Args:
        writes: whether this process writes the file; only one may.
    """

    def __init__(self, path: Path, conditions: Mapping[str, Any], *, writes: bool = True) -> None:
        self._path, self._writes = path, writes
        self.pairs: dict[Key, PairError] = {}
        self.full_norm: float | None = None
        lines = [json.dumps({"conditions": conditions})]
        found = stored_conditions(path)
        if found is not None:
            changed = "; ".join(changed_conditions(found, conditions))
            if changed:
                raise ConfigError(
                    f"{path} holds pairs of another audit ({changed}): give another --out, or delete the file."
                )
            lines += [line for line in path.read_text(encoding="utf-8").splitlines()[1:] if self._take(line)]
        if writes:  # all lines anew, without a last one that was cut off
            write_atomically(path, "\n".join(lines) + "\n")

    def _take(self, line: str) -> bool:
        """Take over what a line of the file says; False where that cannot be read."""
        try:
            entry = json.loads(line)
            if "full_gradient_norm" in entry:
                self.full_norm = float(entry["full_gradient_norm"])
            else:
                key = int(entry["retain_batch_size"]), int(entry["pair"])
                self.pairs[key] = PairError(entry["error"], entry["bound"], entry["degenerate"])
        except (ValueError, KeyError, TypeError):
            return False
        return True

    def put(self, key: Key, pair: PairError) -> None:
        """Keep a pair."""
        self.pairs[key] = pair
        self._append({"retain_batch_size": key[0], "pair": key[1], **asdict(pair)})

    def put_full_norm(self, value: float) -> None:
        """Keep the norm of the full retain gradient."""
        if value != self.full_norm:
            self.full_norm = value
            self._append({"full_gradient_norm": value})

    def _append(self, entry: Mapping[str, Any]) -> None:
        if self._writes:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
