"""Constructed forget/retain problems as dense float64 vectors, and their Gram matrix.

Everything here is the independent side of a test: explicit sums over entries, explicit matrices, or
50-digit arithmetic. Only `Gram` and `Vector` are taken from the package, as the form a rule is fed in.

Notation of the tests: f, r, s are ∇L_f(w), ∇L_r(w), ∇L_r(w+δ); sin θ is ‖q‖/‖f‖. A combination such as
``f − k r`` of size ‖f‖ sin θ is formed from terms of size ‖f‖, so float64 leaves a relative error of
about ``EPS / sin θ`` in it. Tolerances written as ``n * EPS / sine`` say exactly this, with n a small
allowance for the number of roundings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import frexp, fsum, ldexp, sin, sqrt

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from rosu_llm.geometry import Gram, Rosu, Vector

Dense = npt.NDArray[np.float64]

EPS = float(np.finfo(np.float64).eps)

#: Bounded and reproducible: the same examples on every machine, no time limit per example, no database.
bounded = settings(max_examples=60, deadline=None, derandomize=True, database=None)

#: Pairs with q ≠ 0: the closed form applies.
REGULAR = ("random", "orthogonal", "parallel 1e-6", "parallel 1e-12", "opposed 1e-6", "opposed 1e-12")

#: Pairs with q = 0 to the last bit: no retain-neutral direction forgets.
COLLINEAR = ("collinear", "opposite")


def inner(x: Dense, y: Dense) -> float:
    """⟨x, y⟩ with a single rounding per product and an exact sum."""
    return fsum(float(a) * float(b) for a, b in zip(x, y, strict=True))


def norm(x: Dense) -> float:
    """‖x‖."""
    return sqrt(inner(x, x))


def dense(combination: Vector, vectors: Mapping[str, Dense]) -> Dense:
    """The combination as an actual vector."""
    total = np.zeros_like(next(iter(vectors.values())))
    for name in combination:
        total = total + combination[name] * vectors[name]
    return total


def gram_of(vectors: Mapping[str, Dense], measured: bool = True, noise: float = 0.0) -> Gram:
    """Gram matrix of dense vectors, each unordered pair once.

    Args:
        measured: also hand over the inner product of dense combinations.
        noise: largest relative error put on the products (different for each) but not on the
            measurement, as when the Gram matrix was accumulated in low precision.
    """
    names = list(vectors)
    products: dict[tuple[str, str], float] = {}
    for i, first in enumerate(names):
        for second in names[i:]:
            error = noise * sin(1.0 + len(products))
            products[first, second] = inner(vectors[first], vectors[second]) * (1.0 + error)
    if not measured:
        return Gram(products)
    return Gram(products, measure=lambda x, y: inner(dense(x, vectors), dense(y, vectors)))


def orthogonal_part(f: Dense, r: Dense, tau: float = 0.0) -> Dense:
    """q_τ = f − ⟨f,r⟩/(‖r‖²+τ) r in 50-digit arithmetic, rounded once; f where the denominator is zero."""
    with mp.workdps(50):
        big_f, big_r = [mpf(float(x)) for x in f], [mpf(float(x)) for x in r]
        denominator = sum(x * x for x in big_r) + mpf(tau)
        if denominator == 0:
            return f.copy()
        k = sum(x * y for x, y in zip(big_f, big_r, strict=True)) / denominator
        return np.array([float(x - k * y) for x, y in zip(big_f, big_r, strict=True)])


def projector(x: Dense) -> Dense:
    """x xᵀ/‖x‖², the orthogonal projector onto x."""
    unit = x / norm(x)
    return np.outer(unit, unit)


def operator_norm(matrix: Dense) -> float:
    """Largest singular value."""
    return float(np.linalg.norm(matrix, 2))


@dataclass(frozen=True)
class Pair:
    """A forget gradient f and a retain gradient r."""

    f: Dense
    r: Dense

    @property
    def vectors(self) -> dict[str, Dense]:
        return {"f": self.f, "r": self.r}

    @cached_property
    def q(self) -> Dense:
        """(I − P_r) f."""
        return orthogonal_part(self.f, self.r)

    @cached_property
    def sine(self) -> float:
        return norm(self.q) / norm(self.f)

    @cached_property
    def cosine(self) -> float:
        return inner(self.f, self.r) / (norm(self.f) * norm(self.r))


def at_angle(cosine: float, sine: float, seed: int, dim: int, f_norm: float = 1.0, r_norm: float = 1.0) -> Pair:
    """A pair at a given angle, turned at random in ``dim`` dimensions."""
    frame = np.linalg.qr(np.random.default_rng(seed).normal(size=(dim, 2)))[0]
    return Pair(f_norm * (cosine * frame[:, 0] + sine * frame[:, 1]), r_norm * frame[:, 0])


def at_cosine(cosine: float, seed: int = 0, dim: int = 6, f_norm: float = 1.0, r_norm: float = 1.0) -> Pair:
    """A pair with the given cos θ."""
    return at_angle(cosine, sqrt((1.0 - cosine) * (1.0 + cosine)), seed, dim, f_norm, r_norm)


def pair(kind: str, seed: int = 0, dim: int = 6, f_scale: float = 1.0, r_scale: float = 1.0) -> Pair:
    """A pair of one of the kinds `REGULAR` or `COLLINEAR`, at the given scales."""
    rng = np.random.default_rng(seed)
    if kind == "random":
        return Pair(f_scale * rng.normal(size=dim), r_scale * rng.normal(size=dim))
    if kind == "orthogonal":  # Disjoint supports: ⟨f, r⟩ is zero without rounding.
        f, r = f_scale * rng.normal(size=dim), r_scale * rng.normal(size=dim)
        f[: dim // 2], r[dim // 2 :] = 0.0, 0.0
        return Pair(f, r)
    if kind in COLLINEAR:  # Small integers and powers of two: the multiple 3 is exact in float64.
        whole = rng.integers(1, 100, size=dim).astype(np.float64)
        f_two, r_two = ldexp(1.0, frexp(f_scale)[1]), ldexp(1.0, frexp(r_scale)[1])
        return Pair((3.0 if kind == "collinear" else -3.0) * f_two * whole, r_two * whole)
    side, gap = kind.split()
    sine = sqrt(float(gap) * (2.0 - float(gap)))
    cosine = (1.0 - float(gap)) * (1.0 if side == "parallel" else -1.0)
    return at_angle(cosine, sine, seed, dim, f_scale, r_scale)


def feasible_directions(r: Dense, radius: float, count: int, seed: int) -> list[Dense]:
    """Random vectors orthogonal to r with norm at most ``radius``, half of them on the sphere itself."""
    rng = np.random.default_rng([1, seed])  # Not the stream that `pair` draws from.
    unit = r / norm(r)
    found = []
    for i in range(count):
        direction = rng.normal(size=r.size)
        for _ in range(2):  # Twice is enough: what is left along r is then EPS of the direction.
            direction = direction - inner(unit, direction) * unit
        length = radius if i % 2 == 0 else radius * rng.uniform()
        found.append(length / norm(direction) * direction)
    return found


def exact_rosu(tau: float = 0.0, mode: str = "absolute", jacobian: str = "relaxed", eps_q: float = 0.0) -> Rosu:
    """Algorithm 1 to the letter, without safeguards unless asked for: τ = 0 and a fallback at ‖q‖ = 0 only."""
    return Rosu(jacobian=jacobian, tau=tau, tau_mode=mode, eps_q=eps_q, fallback="paper")


@dataclass(frozen=True)
class Quadratic:
    """L(x) = ½ xᵀHx + cᵀx, whose gradient, Hessian and smoothness constant are known exactly."""

    hessian: Dense
    linear: Dense

    def __call__(self, x: Dense) -> float:
        return 0.5 * inner(x, self.hessian @ x) + inner(self.linear, x)

    def gradient(self, x: Dense) -> Dense:
        return self.hessian @ x + self.linear

    @cached_property
    def smoothness(self) -> float:
        """M = ‖H‖_op."""
        return operator_norm(self.hessian)

    @staticmethod
    def with_gradient(hessian: Dense, w: Dense, gradient: Dense) -> Quadratic:
        """The quadratic with this Hessian whose gradient at w is ``gradient``."""
        return Quadratic(hessian, gradient - hessian @ w)


def symmetric(dim: int, rng: np.random.Generator) -> Dense:
    """A random symmetric (indefinite) matrix."""
    matrix = rng.normal(size=(dim, dim))
    return 0.5 * (matrix + matrix.T)


seeds = st.integers(0, 10**6)
dims = st.integers(3, 8)
scales = st.integers(-12, 12).map(lambda exponent: 10.0**exponent)
radii = st.floats(1e-3, 1e2)
regular_pairs = st.builds(pair, st.sampled_from(REGULAR), seeds, dims, scales, scales)
