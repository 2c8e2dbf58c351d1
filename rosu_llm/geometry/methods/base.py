"""What a method is: which gradients it needs, where it perturbs, how it combines them.

A rule sees names and inner products only. The step engine runs the passes a rule asks for and hands
it their Gram matrix; the rule answers with coefficients. A new method is one file here and one line
in :mod:`rosu_llm.geometry.methods.registry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ..gram import Gram
from ..subspace import Subspace
from ..vector import Vector


@dataclass(frozen=True)
class Inner:
    """The answer to the inner problem: where the retain loss is evaluated.

    Attributes:
        delta: the perturbation δ; empty where the rule falls back to plain retain descent.
        direction_norm: norm of the unnormalised direction (‖q_τ‖ for ROSU, ‖f‖ for the standard one).
        alpha: ρ over that norm, the weight of the Jacobian correction; 0 at a fallback.
        fallback: the direction was too small to be trusted; no perturbation, no amplification.
        precise: δ is a small difference of large gradients; form it in float64.
        through: what to hand to the optimizer in place of δ, where the optimizer's own metric turns it into δ.
    """

    delta: Vector
    direction_norm: float
    alpha: float
    fallback: bool = False
    precise: bool = False
    through: Vector | None = None


class Rule(Protocol):
    """A method of the family, as coefficients over captured gradients."""

    @property
    def passes(self) -> tuple[str, ...]:
        """Losses whose gradient at w is needed, in the order they run: ``forget``, ``retain``."""

    @property
    def perturbs(self) -> bool:
        """Whether a further pass at w+δ follows."""

    @property
    def surrogate(self) -> str:
        """Whose loss that pass takes: ``retain``, or ``forget``."""

    @property
    def pulls(self) -> bool:
        """Whether the weights are also moved along βδ (the paper's amplification)."""

    @property
    def samples(self) -> int:
        """How many per-sample retain gradients are wanted besides (``r1``, ``r2``, …); windows may hold fewer."""

    @property
    def metric(self) -> str:
        """``euclidean``, or ``adam``: the Gram matrix then comes with its ``dual``, once the optimizer has state."""

    def protected(self, gram: Gram) -> Subspace | None:
        """The span of the retain gradients that are protected, for rules with ``samples``."""

    def precondition(self, gram: Gram) -> Vector | None:
        """The vector q whose D⁻¹ q is to be captured as ``p`` before :meth:`inner`. Asked only where D is known."""

    def inner(self, gram: Gram, rho: float) -> Inner:
        """δ from the Gram matrix of the gradients at w. Called only if ``perturbs``."""

    @property
    def curves(self) -> bool:
        """Whether Hessian-vector products are needed (captured as ``hf`` and ``hr``)."""

    def curvature(self, gram: Gram, inner: Inner) -> Mapping[str, Vector]:
        """The vectors to multiply by the Hessian of each loss at w, after all passes. Called only if ``curves``."""

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        """The descent gradient v, from the Gram matrix of all captured gradients."""


class Simple:
    """What most rules answer: no per-sample gradients, the Euclidean metric."""

    samples = 0
    metric = "euclidean"

    def protected(self, gram: Gram) -> Subspace | None:
        return None

    def precondition(self, gram: Gram) -> Vector | None:
        return None
