"""ROSU that protects a subspace, or works in the optimizer's metric (paper, Proposition on subspace-constrained ROSU).

Rank k: with P_U the projector onto the span of k sampled per-sample retain gradients (and of their mean, if included),

    q = (I − P_U) f,   δ = ρ q/‖q‖,   v = [I + (ρ/‖q‖)(I − P_U − q qᵀ/‖q‖²)] s.

Every protected direction is neutral to first order; the mean retain loss is up to ρ‖(I − P_U) r‖, and exactly where
the mean is included. Larger subspaces leave less forget gain.

Memory: a batch's mean gradient is a shadow of the whole retain set's. ``protect`` takes an exponential average over the
windows so far in its place, or the gradient of the whole set at the weights of at most ``memory_refresh`` steps ago, or
the span of either and the batch's.

Metric: an adaptive optimizer turns a gradient g into D⁻¹ g, D = √v̂ + ε. There the projection is orthogonal in the
inner product ⟨x, D⁻¹ y⟩, and δ = ρ D⁻¹q/‖D⁻¹q‖: what the optimizer would make of q is neutral. In the coordinates
D^½ w this is plain ROSU, and so is its relaxed Jacobian (which there reads H_f ≈ D instead of H_f ≈ I): with inner
products ⟨x, D⁻¹ y⟩ throughout and α = ρ/‖D⁻¹q‖, v has the form above. D is frozen before the step; as long as the
optimizer has no second moments (the first step), D = I.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError, unknown
from .. import curvature
from ..gram import Gram
from ..projection import Stabilizer
from ..subspace import CUTOFF, Protection
from ..vector import F, P, S, Vector
from .base import BaseRule, InMetric, Inner, Protecting, option
from .rosu import Rosu

PROTECTED = ("batch", "memory", "both")


@dataclass(frozen=True, kw_only=True)
class SubspaceRosu(Rosu, Protecting, InMetric):
    """δ = ρ D⁻¹q/‖D⁻¹q‖ with q = (I − P_U) f; D = I in the Euclidean metric.

    There is no τ: dependent directions are dropped instead. With ``fallback="residue"`` a step falls back to plain
    retain descent also where f lies in the span by the same criterion.
    """

    default_rank = 1

    protect: str = option(
        "batch",
        "Mean retain gradient that rosu protects: of the batch, of the memory of earlier ones, or both.",
    )
    memory_decay: float = option(
        0.9,
        "protect memory or both: share of the memory that each step keeps.",
    )
    memory_refresh: int = option(
        0,
        "protect memory or both: steps between passes over all retain data, whose gradient is the memory; 0: averages.",
    )

    @classmethod
    def build(cls, **options: Any) -> BaseRule:
        """Rank one in the Euclidean metric is Algorithm 1: the mean retain gradient, stabilised by τ."""
        rule = cls(**options)
        if not rule.is_rank_one:
            return rule
        return Rosu(**{name: value for name, value in options.items() if name in Rosu.options()})

    @property
    def is_rank_one(self) -> bool:
        """Whether one direction is protected, in the Euclidean metric."""
        return self.rank == 1 and self.metric == "euclidean" and self.protect == "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protect not in PROTECTED:
            raise unknown("protect", self.protect, PROTECTED)
        if not 0.0 <= self.memory_decay < 1.0:
            raise ConfigError(f"memory_decay={self.memory_decay!r} must be at least 0 and below 1, e.g. 0.9.")
        self._check_refresh()
        if not self.is_rank_one and self.jacobian in curvature.MODES:
            raise ConfigError(
                f"jacobian={self.jacobian!r} is derived for one protected direction in the Euclidean metric: use "
                "jacobian='relaxed' or 'none' with protect_rank > 1, a memory or metric='adam'."
            )

    def _check_refresh(self) -> None:
        if not isinstance(self.memory_refresh, int) or self.memory_refresh < 0:
            raise ConfigError(
                f"memory_refresh={self.memory_refresh!r} is no number of steps: give a whole number ≥ 1, e.g. 10, or 0 "
                "for an average over the windows."
            )
        if not self.memory_refresh:
            return
        if self.protect == "batch":
            raise ConfigError(
                f"memory_refresh={self.memory_refresh} has no effect with protect='batch', which keeps no memory: set "
                "protect='memory' or 'both', or leave it out."
            )
        if self.memory_decay != self.options()["memory_decay"].default:
            raise ConfigError(
                f"memory_decay={self.memory_decay!r} has no effect with memory_refresh={self.memory_refresh}, which "
                "replaces the memory instead of averaging: leave one of them out."
            )

    @property
    def stabilizer(self) -> Stabilizer:
        return Stabilizer(0.0)

    @property
    def protection(self) -> Protection:
        memory, mean = self.protect != "batch", self.protect != "memory"
        if self.rank == 1:
            return Protection(mean=mean, memory=memory)
        return Protection(self.rank, self.include_mean, memory)

    @property
    def remembers(self) -> float | None:
        return self.memory_decay if self.protect != "batch" and not self.memory_refresh else None

    @property
    def refreshes(self) -> int:
        return self.memory_refresh

    def precondition(self, gram: Gram) -> Vector | None:
        return None if gram.dual is None else self.protected(gram).without(F)

    def inner(self, gram: Gram, rho: float) -> Inner:
        inside = gram.dual or gram
        q = self.protected(gram).without(F)
        direction = q if gram.dual is None else P
        norm = gram.norm(direction)
        in_span = inside.squared_norm(q) <= CUTOFF * inside.squared_norm(F)
        if gram.norm(q) <= self.eps_q or (self.fallback == "residue" and in_span):
            return Inner.fall_back(norm)
        alpha = rho / norm
        optimizer_input = None if gram.dual is None else (rho / gram.norm(q)) * q
        return Inner(alpha * direction, norm, alpha, precise=gram.cancels(q), optimizer_input=optimizer_input)

    def _carried_back(self, gram: Gram, inner: Inner) -> Vector:
        inside, span = gram.dual or gram, self.protected(gram)
        q = span.without(F)
        along = inside.dot(q, S) / inside.squared_norm(q)
        return S + inner.alpha * (span.without(S, exact=False) - along * q)
