"""The exact Jacobian of the surrogate point, and its two halves (paper, App. on exact and relaxed outer gradients).

δ(w) = ρ q/‖q‖ with q = f − k r, k = ⟨f,r⟩/D, D = ‖r‖² + τ. Differentiating L_r(w + δ(w)) gives, with
z = (I − P_⊥) s, c = ⟨z,r⟩/D and D' = dD/d‖r‖²,

    v = s + (ρ/‖q‖) { H_f x + H_r y },    x = z − c r,    y = −k z − c f + 2 k c D' r.

The relaxed form replaces H_f by the identity (A2) and drops the differential of the projector, H_r y (A1). So:

    exact   both Hessians
    no_a1   H_f = I, the projector's differential kept
    no_a2   the true H_f, the projector fixed

Two (or one) Hessian-vector products by double backward: about three times a pass each, and the graph of the backward
pass is kept meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from .gram import Gram
from .methods.base import Inner
from .projection import Stabilizer
from .vector import HF, HR, F, R, S, Vector

MODES = ("exact", "no_a1", "no_a2")


@dataclass(frozen=True)
class Directions:
    """The vectors x and y that the Hessians act on."""

    forget: Vector
    retain: Vector


def directions(gram: Gram, inner: Inner, stabilizer: Stabilizer) -> Directions:
    """x and y from the inner products of f, r and s."""
    retain_square = gram(R, R)
    denominator = stabilizer.denominator(retain_square)
    slope = 1.0 + (stabilizer.tau if stabilizer.mode == "relative" else 0.0)
    u = inner.delta / (inner.alpha * inner.direction_norm)
    z = S - gram.dot(u, S) * u
    k, c = gram(F, R) / denominator, gram.dot(z, R) / denominator
    return Directions(z - c * R, -k * z - c * F + (2.0 * k * c * slope) * R)


def needed(mode: str, found: Directions) -> dict[str, Vector]:
    """Which products a mode needs: loss → vector."""
    products = {"forget": found.forget, "retain": found.retain}
    kept = {"exact": ("forget", "retain"), "no_a1": ("retain",), "no_a2": ("forget",)}[mode]
    return {name: products[name] for name in kept}


def outer(mode: str, alpha: float, found: Directions) -> Vector:
    """v, given that the products are there."""
    forget = found.forget if mode == "no_a1" else HF
    retain = Vector() if mode == "no_a2" else HR
    return S + alpha * (forget + retain)
