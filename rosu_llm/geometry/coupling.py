"""How strongly forgetting and retaining pull on the same weights, and what that costs to first order.

All quantities are functions of the 2×2 Gram matrix of f = ∇L_f(w) and r = ∇L_r(w).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from .gram import Gram
from .vector import F, R


@dataclass(frozen=True)
class Coupling:
    """First-order picture of one forget/retain pair (paper §2.1, Propositions 2 and 5).

    Attributes:
        cosine: cos θ, clipped to [−1, 1]; 0 where a gradient vanishes.
        sine: sin θ = ‖q‖/‖f‖, the share of first-order forget gain that retain-neutrality keeps.
        standard_retain_change: ⟨r, δ_std⟩ = ρ‖r‖cos θ.
        standard_forget_gain: ⟨f, δ_std⟩ = ρ‖f‖.
        neutral_forget_gain: ⟨f, δ_rosu⟩ = ρ‖q‖.
        distance: ‖δ_rosu − δ_std‖ = ρ√(2(1 − sin θ)).
    """

    cosine: float
    sine: float
    standard_retain_change: float
    standard_forget_gain: float
    neutral_forget_gain: float
    distance: float


def cosine(gram: Gram) -> float:
    """cos θ between f and r; 0 where either vanishes, because then nothing is coupled."""
    scale = sqrt(gram(F, F)) * sqrt(gram(R, R))
    if scale == 0.0:
        return 0.0
    return min(1.0, max(-1.0, gram(F, R) / scale))


def coupling(gram: Gram, rho: float) -> Coupling:
    """Every first-order quantity of the paper's §2–3 at radius ``rho``."""
    f_norm, r_norm = gram.norm(F), gram.norm(R)
    retain_square = gram(R, R)
    q = F - (gram(F, R) / retain_square) * R if retain_square > 0.0 else F
    q_norm = gram.norm(q)
    sine = min(1.0, q_norm / f_norm) if f_norm > 0.0 else 1.0
    cos = cosine(gram)
    return Coupling(
        cosine=cos,
        sine=sine,
        standard_retain_change=rho * r_norm * cos,
        standard_forget_gain=rho * f_norm,
        neutral_forget_gain=rho * q_norm,
        # √(2(1 − sin θ)) without the cancellation near orthogonality: 1 − sin θ = cos²θ/(1 + sin θ)
        distance=rho * abs(cos) * sqrt(2.0 / (1.0 + sine)),
    )
