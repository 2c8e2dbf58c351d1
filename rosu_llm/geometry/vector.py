"""Linear combinations of captured gradients, written as in the paper.

A gradient of a billion entries never enters this package. Here it is a *name*, and a vector is a
combination of names: ``q = f - k * r`` holds two coefficients. What such a vector needs from the
real gradients (inner products) comes from their :class:`~rosu_llm.geometry.gram.Gram` matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from . import slots


@dataclass(frozen=True)
class Vector:
    """A combination ``Σ cᵢ gᵢ`` of named gradients; supports ``+``, ``-``, ``*`` and ``/``."""

    coefficients: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def named(name: str) -> Vector:
        """The gradient called ``name`` itself."""
        return Vector({name: 1.0})

    def __getitem__(self, name: str) -> float:
        return self.coefficients.get(name, 0.0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.coefficients)

    def __add__(self, other: Vector) -> Vector:
        total = dict(self.coefficients)
        for name, value in other.coefficients.items():
            total[name] = total.get(name, 0.0) + value
        return Vector(total)

    def __sub__(self, other: Vector) -> Vector:
        return self + (-1.0) * other

    def __mul__(self, scale: float) -> Vector:
        return Vector({name: scale * value for name, value in self.coefficients.items()})

    __rmul__ = __mul__

    def __truediv__(self, scale: float) -> Vector:
        return Vector({name: value / scale for name, value in self.coefficients.items()})

    def __neg__(self) -> Vector:
        return self * -1.0


#: ∇L_f(w), ∇L_r(w) and ∇L_r(w+δ): the three gradients of the paper's Algorithm 1.
F = Vector.named(slots.FORGET)
R = Vector.named(slots.RETAIN)
S = Vector.named(slots.SURROGATE)
#: The gradient on wrong answers to the forget questions.
X = Vector.named(slots.MISMATCH)
#: D⁻¹q of a projection in the optimizer's metric.
P = Vector.named(slots.PRECONDITIONED)
#: Hessian-vector products of the forget and the retain loss.
HF = Vector.named(slots.FORGET_HESSIAN)
HR = Vector.named(slots.RETAIN_HESSIAN)
