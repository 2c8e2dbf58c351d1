"""The error of one mini-batch pair: how far its retain-neutral direction is from neutral for the whole retain set.

With g = ∇L_r over all retain samples, and f, r the gradients of a forget and a retain mini-batch (paper, app:retain-
batch-size):

    q = f − ⟨f,r⟩/‖r‖² · r,   u = q/‖q‖,   ε_orth = |⟨g,u⟩|/‖g‖ = |cos(g, u)| ≤ ‖g − r‖/‖g‖.

The projector is the ideal one, without τ: the audit is about the geometry of the constraint, not about its stabiliser.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, NonFiniteError
from ...geometry import F, Gram, R, Stabilizer, Vector, retain_orthogonal

#: ∇L_r over the full retain set.
G = Vector.named("g")

#: ‖q‖/‖f‖ at or below which q is rounding error of float32 gradients and its direction means nothing.
DEGENERATE = 1e-6

#: Share of ‖g‖ by which rounding may lift the error above its bound.
ROUNDING = 1e-9

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class PairError:
    """One pair; the relative figures are these over ‖g‖.

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


def draw_pair(seed: int, pair: int, forget: tuple[int, int], retain: tuple[int, int]) -> tuple[Indices, Indices]:
    """Forget and retain mini-batch of a pair, each (set size, batch size), without repetition within a batch.

    A function of its arguments alone, so that an interrupted audit goes on as if it had never stopped.
    """
    generator = np.random.default_rng([abs(seed), retain[1], pair])
    chosen = [generator.choice(count, size, replace=False) for count, size in (forget, retain)]
    return np.sort(chosen[0]), np.sort(chosen[1])


def check_full(norm: float) -> None:
    """Raise where the error relative to the full retain gradient is not defined."""
    if not np.isfinite(norm):
        raise NonFiniteError(
            f"The norm of the full retain gradient is {norm}: check the weights and the retain data, or use float32."
        )
    if norm == 0.0:
        raise DataError(
            "The full retain gradient is zero, so there is no direction to be orthogonal to: check the retain data and "
            "which parameters are trained."
        )
