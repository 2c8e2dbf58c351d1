"""Inner products of combinations of gradients, from the Gram matrix, without losing digits.

``‖f − k r‖²`` expanded as ``⟨f,f⟩ − 2k⟨f,r⟩ + k²⟨r,r⟩`` subtracts nearly equal numbers when f and r
are nearly parallel: at cos θ = 0.9999 four digits are gone, and with a Gram matrix accumulated in
float32 the perturbation is visibly short. Two guards: the Gram is float64, and where the expansion
still cancels more than three digits the norm is measured again from the vector itself, streamed
over the parameters (`measure`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt

from .vector import Vector

#: Share of the expanded terms that must survive; below it the value is measured directly.
CANCELLATION = 2e-3

Measure = Callable[[Vector, Vector], float]


@dataclass(frozen=True)
class Gram:
    """Inner products ``⟨gᵢ, gⱼ⟩`` of named gradients in float64.

    Args:
        products: value for each unordered pair of names, keyed either way round.
        measure: exact inner product of two combinations by a pass over the real tensors; used only
            where the expansion cancels. Without it the expansion is all there is.
        dual: the same for ``⟨gᵢ, D⁻¹ gⱼ⟩``, where a rule works in the metric D of the optimizer.
    """

    products: Mapping[tuple[str, str], float]
    measure: Measure | None = None
    dual: Gram | None = None

    @property
    def names(self) -> set[str]:
        """The gradients whose inner products are known."""
        return {name for pair in self.products for name in pair}

    def knows(self, x: Vector) -> bool:
        """Whether inner products with ``x`` can be expanded."""
        return self.names.issuperset(x)

    def __call__(self, x: Vector, y: Vector) -> float:
        """``⟨x, y⟩``, expanded over the Gram matrix."""
        return self._expand(x, y)[0]

    def squared_norm(self, x: Vector) -> float:
        """``‖x‖²`` to full relative precision, never negative."""
        value, size = self._expand(x, x)
        if abs(value) < CANCELLATION * size and self.measure is not None:
            value = self.measure(x, x)
        return max(value, 0.0)

    def norm(self, x: Vector) -> float:
        """``‖x‖``."""
        return sqrt(self.squared_norm(x))

    def cancels(self, x: Vector) -> bool:
        """Whether ``x`` is a small difference of large gradients and must be formed in float64."""
        value, size = self._expand(x, x)
        return abs(value) < CANCELLATION * size

    def dot(self, x: Vector, y: Vector) -> float:
        """``⟨x, y⟩``, measured directly where the expansion cancels."""
        value, size = self._expand(x, y)
        if abs(value) < CANCELLATION * size and self.measure is not None:
            return self.measure(x, y)
        return value

    def _expand(self, x: Vector, y: Vector) -> tuple[float, float]:
        value = size = 0.0
        for i, a in x.coefficients.items():
            for j, b in y.coefficients.items():
                term = a * b * self._pair(i, j)
                value += term
                size += abs(term)
        return value, size

    def _pair(self, i: str, j: str) -> float:
        products = self.products
        return products[i, j] if (i, j) in products else products[j, i]
