"""ROSU: the strongest forgetting direction among those the retain loss does not feel (Algorithm 1).

Inner problem (Proposition 1): maximise ⟨f, δ⟩ over ‖δ‖ ≤ ρ with ⟨r, δ⟩ = 0. Its solution is
δ = ρ q/‖q‖ with q = (I − P_r) f. The outer gradient is s = ∇L_r(w+δ), carried back to w by the
relaxed Jacobian (Lemma 1): v = [I + (ρ/‖q‖)(I − P_r − P_⊥)] s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

from ...errors import unknown
from .. import curvature
from ..gram import Gram
from ..projection import Stabilizer, retain_orthogonal
from ..vector import F, R, S, Vector
from .base import Inner, Surrogate, option

JACOBIANS = ("relaxed", "none", *curvature.MODES)
COMPONENTS = ("full", "delta_only", "v_only")
FALLBACKS = ("residue", "paper")


@dataclass(frozen=True, kw_only=True)
class Rosu(Surrogate):
    """Retain-orthogonal surrogate unlearning.

    Args:
        jacobian: ``relaxed`` (Algorithm 1), ``none`` (Algorithm 2, the zero-order variant: v = s), or with Hessians
            ``exact``, ``no_a1``, ``no_a2`` (:mod:`rosu_llm.geometry.curvature`).
        tau, tau_mode: τ of the projection.
        eps_q: ‖q_τ‖ at or below which the step falls back to plain retain descent (Lemma 5).
        fallback: ``paper`` falls back on ε_q alone, as Algorithm 1 is written; ``residue`` also where q_τ is mostly
            what τ leaves of the retain direction, which the paper leaves open.
        components: ``full`` (w + βδ − ηv), or one of its two terms for the ablation: ``delta_only`` (w + βδ),
            ``v_only`` (w − ηv).
    """

    jacobian: str = option(
        "relaxed", "Outer gradient: relaxed (Alg. 1), none (Alg. 2); with Hessians: exact, no_a1, no_a2."
    )
    components: str = option("full", "Terms of the update: full, delta_only (βδ) or v_only (−ηv), for ablations.")
    tau: float = option(1e-8, "Stabiliser τ of the projection.")
    tau_mode: str = option("absolute", "τ absolute as in the paper, or relative to ‖r‖².")
    fallback: str = option(
        "residue",
        "When rosu takes a plain retain step: paper (‖q‖ ≤ eps_q alone), or residue (also where q is mostly what τ "
        "leaves of the retain gradient).",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("jacobian", JACOBIANS), ("components", COMPONENTS), ("fallback", FALLBACKS)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        _ = self.stabilizer  # checks τ

    @property
    def stabilizer(self) -> Stabilizer:
        return Stabilizer(self.tau, self.tau_mode)

    @property
    def pulls(self) -> bool:
        return self.components != "v_only"

    def inner(self, gram: Gram, rho: float) -> Inner:
        q = retain_orthogonal(F, gram, self.stabilizer)
        q_norm = gram.norm(q)
        if q_norm <= self.eps_q or (self.fallback == "residue" and self._all_residue(gram, q_norm)):
            return Inner.fall_back(q_norm)
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
    def needs_hessian(self) -> bool:
        return self.jacobian in curvature.MODES and self.components != "delta_only"

    def hessian_directions(self, gram: Gram, inner: Inner) -> Mapping[str, Vector]:
        return curvature.needed(self.jacobian, curvature.directions(gram, inner, self.stabilizer))

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        if self.components == "delta_only":
            return Vector()
        if inner is None or inner.fallback:
            return R
        return S if self.jacobian == "none" else self._carried_back(gram, inner)

    def _carried_back(self, gram: Gram, inner: Inner) -> Vector:
        """s carried back to w by the Jacobian of the surrogate point."""
        if self.needs_hessian:
            return curvature.outer(self.jacobian, inner.alpha, curvature.directions(gram, inner, self.stabilizer))
        u = inner.delta / (inner.alpha * inner.direction_norm)
        c1 = gram(R, S) / self.stabilizer.denominator(gram(R, R))
        c2 = gram.dot(u, S)
        return S + inner.alpha * (S - c1 * R - c2 * u)
