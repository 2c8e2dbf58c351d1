"""ROSU: the strongest forgetting direction among those the retain loss does not feel (Algorithm 1).

Inner problem (Proposition 1): maximise ⟨f, δ⟩ over ‖δ‖ ≤ ρ with ⟨r, δ⟩ = 0. Its solution is
δ = ρ q/‖q‖ with q = (I − P_r) f. The outer gradient is s = ∇L_r(w+δ), carried back to w by the
relaxed Jacobian (Lemma 1): v = [I + (ρ/‖q‖)(I − P_r − P_⊥)] s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, sqrt

from ...errors import ConfigError, unknown
from .. import curvature
from ..gram import Gram
from ..projection import Stabilizer, retain_orthogonal
from ..vector import F, R, S, Vector
from .base import Inner, Simple

JACOBIANS = ("relaxed", "none", *curvature.MODES)
COMPONENTS = ("full", "delta_only", "v_only")


def check_threshold(eps_q: float) -> None:
    """ε_q must be a finite number ≥ 0."""
    if not (eps_q >= 0.0 and isfinite(eps_q)):
        raise ConfigError(f"eps_q={eps_q!r} is no threshold for a norm: give a number ≥ 0, e.g. 1e-6.")


@dataclass(frozen=True)
class Rosu(Simple):
    """Retain-orthogonal surrogate unlearning.

    Args:
        jacobian: ``relaxed`` (Algorithm 1), ``none`` (Algorithm 2, the zero-order variant: v = s), or with Hessians
            ``exact``, ``no_a1``, ``no_a2`` (:mod:`rosu_llm.geometry.curvature`).
        stabilizer: τ of the projection.
        eps_q: ‖q_τ‖ at or below which the step falls back to plain retain descent (Lemma 5). It also falls
            back where q_τ is mostly the residue of τ along r, which the paper leaves open.
        literal: fall back on ε_q alone, as Algorithm 1 is written.
        components: ``full`` (w + βδ − ηv), or one of its two terms for the ablation: ``delta_only`` (w + βδ),
            ``v_only`` (w − ηv).
    """

    jacobian: str = "relaxed"
    stabilizer: Stabilizer = field(default_factory=Stabilizer)
    eps_q: float = 1e-6
    literal: bool = False
    components: str = "full"

    passes = ("forget", "retain")
    perturbs = True
    surrogate = "retain"

    def __post_init__(self) -> None:
        if self.jacobian not in JACOBIANS:
            raise unknown("jacobian", self.jacobian, JACOBIANS)
        if self.components not in COMPONENTS:
            raise unknown("components", self.components, COMPONENTS)
        check_threshold(self.eps_q)

    @property
    def pulls(self) -> bool:
        return self.components != "v_only"

    def inner(self, gram: Gram, rho: float) -> Inner:
        q = retain_orthogonal(F, gram, self.stabilizer)
        q_norm = gram.norm(q)
        if q_norm <= self.eps_q or (not self.literal and self._all_residue(gram, q_norm)):
            return Inner(Vector(), q_norm, alpha=0.0, fallback=True)
        alpha = rho / q_norm
        return Inner(alpha * q, q_norm, alpha, precise=gram.cancels(q))

    def _all_residue(self, gram: Gram, q_norm: float) -> bool:
        """Whether q_τ is mostly what τ left of the retain direction, so that δ would point along ±r.

        For f parallel to r, q_τ = f·τ/(‖r‖²+τ) is nothing but residue; with a large ‖f‖ it passes the
        absolute ε_q, and Algorithm 1 to the letter would then take the *most* retain-damaging step. Where
        ‖r‖² < τ there is no retain gradient to speak of, and following f is what τ is for.
        """
        retain_square = gram(R, R)
        residue = self.stabilizer.residue(retain_square)
        if residue >= 0.5:
            return False
        along = residue * abs(gram(F, R)) / sqrt(retain_square)
        return along > sqrt(0.5) * q_norm

    @property
    def curves(self) -> bool:
        return self.jacobian in curvature.MODES and self.components != "delta_only"

    def curvature(self, gram: Gram, inner: Inner) -> Mapping[str, Vector]:
        return curvature.needed(self.jacobian, curvature.directions(gram, inner, self.stabilizer))

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        if self.components == "delta_only":
            return Vector()
        if inner is None or inner.fallback:
            return R
        if self.jacobian == "none":
            return S
        if self.curves:
            return curvature.outer(self.jacobian, inner.alpha, curvature.directions(gram, inner, self.stabilizer))
        u = inner.delta / (inner.alpha * inner.direction_norm)
        c1 = gram(R, S) / self.stabilizer.denominator(gram(R, R))
        c2 = gram.dot(u, S)
        return S + inner.alpha * (S - c1 * R - c2 * u)
