"""Propositions 3 and 4: how far the relaxed outer gradient is from the exact one.

L_f and L_r are quadratics, so ε_H = ‖∇²L_f − I‖ is known and δ_rosu(w) is an explicit function of w. Its
exact Jacobian is taken by complex steps: Im δ(w + ih e_j)/h with h = 10⁻³⁰ has no truncation error in
float64 and owes nothing to the formulas under test.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from .problems import (
    EPS,
    Dense,
    Pair,
    Quadratic,
    dense,
    exact_rosu,
    gram_of,
    norm,
    operator_norm,
    projector,
    symmetric,
)

Complex = npt.NDArray[np.complex128]
STEP = 1e-30
DIM = 5


@dataclass(frozen=True)
class Scene:
    """A point w, two quadratic losses and a radius."""

    w: Dense
    forget: Quadratic
    retain: Quadratic
    rho: float

    @property
    def pair(self) -> Pair:
        return Pair(self.forget.gradient(self.w), self.retain.gradient(self.w))

    def delta_at(self, w: Complex) -> Complex:
        """δ_rosu(w) = ρ q/‖q‖, analytic in w."""
        f = self.forget.hessian @ w + self.forget.linear
        r = self.retain.hessian @ w + self.retain.linear
        q = f - (f @ r) / (r @ r) * r
        return self.rho * q / np.sqrt(q @ q)

    def exact_jacobian(self) -> Dense:
        columns = [self.delta_at(self.w + 1j * STEP * e).imag / STEP for e in np.eye(DIM)]
        return np.column_stack(columns)

    def exact_gradient(self) -> Dense:
        """∇F(w) of F(w) = L_r(w + δ_rosu(w)), by complex steps through F itself."""

        def value(w: Complex) -> complex:
            x = w + self.delta_at(w)
            return complex(0.5 * x @ self.retain.hessian @ x + self.retain.linear @ x)

        return np.array([value(self.w + 1j * STEP * e).imag / STEP for e in np.eye(DIM)])

    @property
    def surrogate_gradient(self) -> Dense:
        return self.retain.gradient(self.w + self.delta_at(self.w.astype(complex)).real)

    def relaxed_jacobian(self) -> Dense:
        """Ĵ as the package applies it: v − s for every unit vector in the place of s (Ĵ is symmetric)."""
        columns = []
        for e in np.eye(DIM):
            vectors = {**self.pair.vectors, "s": e}
            rule, gram = exact_rosu(), gram_of(vectors)
            columns.append(dense(rule.outer(gram, rule.inner(gram, self.rho)), vectors) - e)
        return np.column_stack(columns)

    def relaxed_gradient(self) -> Dense:
        vectors = {**self.pair.vectors, "s": self.surrogate_gradient}
        rule, gram = exact_rosu(), gram_of(vectors)
        return dense(rule.outer(gram, rule.inner(gram, self.rho)), vectors)

    def projector_derivative(self, direction: Dense) -> Dense:
        """DP_r(w)[ξ] by the quotient rule on r rᵀ/‖r‖² with Dr[ξ] = Hξ."""
        r, h = self.pair.r, self.retain.hessian @ direction
        square = r @ r
        return (np.outer(h, r) + np.outer(r, h)) / square - 2.0 * (r @ h) * np.outer(r, r) / square**2

    @property
    def eps_h(self) -> float:
        return operator_norm(self.forget.hessian - np.eye(DIM))

    @property
    def eps_p(self) -> float:
        """sup ‖DP_r[ξ]‖ over unit ξ: with n = (I − P_r)Hξ, (n rᵀ + r nᵀ)/‖r‖² has norm ‖n‖/‖r‖."""
        r = self.pair.r
        return operator_norm((np.eye(DIM) - projector(r)) @ self.retain.hessian) / norm(r)


def scene(seed: int, forget_error: float, retain_curvature: float, rho: float = 0.3) -> Scene:
    """∇²L_f = I + forget_error·(symmetric), ∇²L_r = retain_curvature·(symmetric)."""
    rng = np.random.default_rng([6, seed])
    forget = Quadratic(np.eye(DIM) + forget_error * symmetric(DIM, rng), rng.normal(size=DIM))
    retain = Quadratic(retain_curvature * symmetric(DIM, rng), rng.normal(size=DIM))
    return Scene(rng.normal(size=DIM), forget, retain, rho)


SEEDS = range(6)
LEVELS = [(0.0, 0.0), (0.01, 0.0), (0.0, 0.01), (0.1, 0.1), (2.0, 0.5), (0.5, 2.0)]


@pytest.mark.parametrize("seed", SEEDS)
def test_sup_of_projector_derivative_is_eps_p(seed: int) -> None:
    """ε_P used below is the supremum: no random direction exceeds it and one attains it."""
    x = scene(seed, 0.1, 1.0)
    rng = np.random.default_rng(seed)
    for direction in rng.normal(size=(50, DIM)):
        value = operator_norm(x.projector_derivative(direction / norm(direction)))
        assert value <= x.eps_p * (1.0 + 64 * EPS)  # a 5×5 singular value
    best = np.linalg.svd((np.eye(DIM) - projector(x.pair.r)) @ x.retain.hessian)[2][0]
    assert operator_norm(x.projector_derivative(best)) == pytest.approx(x.eps_p, rel=64 * EPS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("levels", LEVELS)
def test_exact_jacobian_and_gradient(seed: int, levels: tuple[float, float]) -> None:
    """J = (ρ/‖q‖)(I − P_⊥)[(I − P_r)∇²L_f − DP_r[·]f] and ∇F = (I + Jᵀ)s (Proposition 4)."""
    x = scene(seed, *levels)
    p, identity = x.pair, np.eye(DIM)
    derivative = np.column_stack([x.projector_derivative(e) @ p.f for e in identity])
    inner_jacobian = (identity - projector(p.r)) @ x.forget.hessian - derivative
    jacobian = x.rho / norm(p.q) * (identity - projector(p.q)) @ inner_jacobian
    exact = x.exact_jacobian()
    scale = (1.0 + operator_norm(exact)) / p.sine
    assert operator_norm(jacobian - exact) <= 256 * EPS * scale  # 5×5 products, δ known to EPS/sin θ
    expected = (identity + exact.T) @ x.surrogate_gradient
    assert norm(x.exact_gradient() - expected) <= 256 * EPS * scale * norm(x.surrogate_gradient)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("rho", [1e-3, 0.3, 3.0])
def test_jacobian_deviation_bound(seed: int, levels: tuple[float, float], rho: float) -> None:
    """‖J − Ĵ‖ ≤ (ρ/‖q‖)(ε_H + ε_P‖f‖) (Proposition 3)."""
    x = scene(seed, *levels, rho)
    deviation = operator_norm(x.exact_jacobian() - x.relaxed_jacobian())
    bound = rho / norm(x.pair.q) * (x.eps_h + x.eps_p * norm(x.pair.f))
    # Ĵ is read off as v − s, which rounds at the size of 1 + α.
    assert deviation <= bound + 256 * EPS * (1.0 + rho / norm(x.pair.q)) / x.pair.sine


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("rho", [1e-3, 0.3, 3.0])
def test_gradient_deviation_bound(seed: int, levels: tuple[float, float], rho: float) -> None:
    """‖∇F − v‖ ≤ (ρ‖s‖/‖q‖)(ε_H + ε_P‖f‖) (Proposition 3)."""
    x = scene(seed, *levels, rho)
    s, p = x.surrogate_gradient, x.pair
    deviation = norm(x.exact_gradient() - x.relaxed_gradient())
    bound = rho * norm(s) / norm(p.q) * (x.eps_h + x.eps_p * norm(p.f))
    assert deviation <= bound + 256 * EPS * (1.0 + rho / norm(p.q)) / p.sine * norm(s)  # as above


@pytest.mark.parametrize("seed", SEEDS)
def test_surrogate_gradient_is_bounded_by_the_base_point(seed: int) -> None:
    """‖s‖ ≤ ‖r‖ + M_rρ, so the bound can be stated at w (text after Proposition 3)."""
    for rho in (1e-3, 0.3, 3.0):
        x = scene(seed, 0.1, 1.0, rho)
        # δ has norm ρ up to EPS/sin θ.
        allowed = (norm(x.pair.r) + x.retain.smoothness * rho) * (1.0 + 64 * EPS / x.pair.sine)
        assert norm(x.surrogate_gradient) <= allowed


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rho", [1e-3, 0.3, 3.0])
def test_relaxed_gradient_is_exact_where_both_relaxations_hold(seed: int, rho: float) -> None:
    """∇²L_f = I and a retain Hessian along r only (DP_r = 0) give v = ∇F (Lemma 1, Assumption 2).

    The retain loss is curved, so s ≠ r and the identity is not that of a linear loss.
    """
    rng = np.random.default_rng([7, seed])
    w, r = rng.normal(size=DIM), rng.normal(size=DIM)
    retain = Quadratic.with_gradient(2.0 * projector(r), w, r)
    x = Scene(w, Quadratic(np.eye(DIM), rng.normal(size=DIM)), retain, rho)
    assert x.eps_p <= 64 * EPS * 2.0 / norm(r)  # zero up to the rounding of 2 P_r
    scale = (1.0 + rho / norm(x.pair.q)) / x.pair.sine * norm(x.surrogate_gradient)
    assert norm(x.exact_gradient() - x.relaxed_gradient()) <= 256 * EPS * scale  # as in the bounds above


@pytest.mark.parametrize("seed", SEEDS)
def test_deviation_shrinks_with_the_assumptions_violated(seed: int) -> None:
    """Scaling both errors by 10⁻³ scales the deviation: the bound is of the right order (Proposition 3)."""
    rng = np.random.default_rng([8, seed])
    w, f, r = rng.normal(size=(3, DIM))
    forget_error, retain_hessian = symmetric(DIM, rng), symmetric(DIM, rng)
    deviations = []
    for t in (1e-2, 1e-5):
        forget = Quadratic.with_gradient(np.eye(DIM) + t * forget_error, w, f)
        x = Scene(w, forget, Quadratic.with_gradient(t * retain_hessian, w, r), 0.3)
        deviations.append(norm(x.exact_gradient() - x.relaxed_gradient()))
    # J − Ĵ is linear in the two errors; s = r + t·Hδ adds a relative change of order t = 1e-2.
    assert deviations[1] == pytest.approx(1e-3 * deviations[0], rel=0.2)
    assert deviations[0] > 1e-5  # not rounding error
