"""The span of several retain gradients, and projections onto it (paper, App. on multi-direction retain protection).

The paper orthonormalises k sampled per-sample gradients by QR. Here they are names with a k×k Gram matrix G, which
gives the same projector: with G = N V Λ Vᵀ N (N the norms, so that a long gradient does not hide a short one), the
vectors u_j = Σ_i V_ij/(n_i √λ_j) r_i are an orthonormal basis of the span. Directions with λ_j ≤ 10⁻¹⁰ λ_max depend on
the others to within 10⁻⁵ of their length, which in float32 gradients is mostly noise: they are dropped, and so are zero
gradients. The cut-off takes the place of the τ of rank one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from ..errors import DataError
from .gram import Gram
from .slots import MEMORY, RETAIN, sample_slot
from .vector import Vector

#: Share of the largest eigenvalue below which a direction depends on the others.
CUTOFF = 1e-10


@dataclass(frozen=True)
class Subspace:
    """An orthonormal basis, as combinations of gradients.

    Attributes:
        basis: the vectors u_j.
        gram: the inner product in which they are orthonormal.
    """

    basis: tuple[Vector, ...]
    gram: Gram

    @staticmethod
    def spanned_by(vectors: Sequence[Vector], gram: Gram) -> Subspace:
        """The span of ``vectors``, without directions that depend on others."""
        norms = {i: gram.norm(v) for i, v in enumerate(vectors)}
        kept = [i for i, n in norms.items() if n > 0.0]
        if not kept:
            return Subspace((), gram)
        matrix = np.array([[gram(vectors[i], vectors[j]) / (norms[i] * norms[j]) for j in kept] for i in kept])
        values, columns = np.linalg.eigh(matrix)
        basis = tuple(
            _sum((float(c) / (norms[i] * sqrt(value))) * vectors[i] for c, i in zip(column, kept, strict=True))
            for value, column in zip(values.tolist(), columns.T, strict=True)
            if value > CUTOFF * values[-1]
        )
        return Subspace(basis, gram)

    @property
    def rank(self) -> int:
        """Number of independent directions."""
        return len(self.basis)

    def project(self, x: Vector) -> Vector:
        """``P_U x``."""
        return x - self.without(x)

    def without(self, x: Vector, *, exact: bool = True) -> Vector:
        """``(I − P_U) x``, projected a second time where the first leaves rounding error behind.

        With ``exact=False``, for an x that only enters v, that happens only where nearly dependent directions make
        P_U x itself inaccurate, and not where x lies almost in the span (as s does near r).
        """
        inside = _sum(self.gram(x, u) * u for u in self.basis)
        rest, measure = x - inside, self.gram.measure
        if measure is not None and self.gram.cancels(rest if exact else inside):
            rest = rest - _sum(measure(rest, u) * u for u in self.basis)
        return rest

    def share_outside(self, x: Vector) -> float:
        """‖(I − P_U) x‖/‖x‖ to about eight digits, from the Gram matrix alone; 0 where x vanishes."""
        square = self.gram(x, x)
        inside = sum(self.gram(x, u) ** 2 for u in self.basis)
        return sqrt(max(0.0, 1.0 - inside / square)) if square > 0.0 else 0.0


@dataclass(frozen=True)
class Protection:
    """Which retain gradients are protected: k sampled ones, the mean over the window, that over earlier windows."""

    samples: int = 0
    mean: bool = True
    memory: bool = False

    def span(self, gram: Gram) -> Subspace:
        """Their span in the metric of ``gram``; a window with fewer samples gives fewer directions."""
        found = gram.names
        names = [name for name in map(sample_slot, range(self.samples)) if name in found]
        names += [RETAIN] if self.mean else []
        names += [MEMORY] if self.memory else []
        return Subspace.spanned_by([Vector.named(name) for name in names], gram)


def check_independent(gram: Gram, count: int) -> None:
    """Refuse ``count`` > 1 samples whose gradients all point in one direction; zero gradients are not counted."""
    vectors = [x for x in (Vector.named(sample_slot(i)) for i in range(count)) if gram.norm(x) > 0.0]
    if len(vectors) > 1 and Subspace.spanned_by(vectors, gram).rank == 1:
        raise DataError(
            f"The gradients of {len(vectors)} retain samples all point in one direction: the samples repeat one "
            "another, or too few parameters are trained. Check the retain data, or use method='rosu' with "
            "protect_rank=1."
        )


def _sum(vectors: Iterable[Vector]) -> Vector:
    return sum(vectors, Vector())
