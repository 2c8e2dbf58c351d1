"""The regularised retain-orthogonal projection ``q_τ = f − ⟨f,r⟩/(‖r‖²+τ)·r`` (Algorithm 1, line 2).

τ keeps the quotient finite where the retain gradient vanishes. It also leaves a residue: to first
order the perturbation is neutral only up to the factor τ/(‖r‖²+τ) (Lemma 2), so when ‖r‖² is of the
size of τ the protection fades. With ``tau_mode="relative"`` τ is a fraction of ‖r‖² and the factor is a
constant τ/(1+τ), however small ‖r‖ gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

from ..errors import ConfigError, unknown
from .gram import Gram
from .vector import R, Vector

TAU_MODES = ("absolute", "relative")


@dataclass(frozen=True)
class Stabilizer:
    """τ, either absolute as in the paper or relative to ‖r‖²."""

    tau: float = 1e-8
    mode: str = "absolute"

    def __post_init__(self) -> None:
        if self.mode not in TAU_MODES:
            raise unknown("tau_mode", self.mode, TAU_MODES)
        if not (self.tau >= 0.0 and isfinite(self.tau)):
            raise ConfigError(f"tau={self.tau!r} cannot stabilise a division: give a number ≥ 0, e.g. 1e-8.")

    def amount(self, retain_square: float) -> float:
        """The τ in force for this ‖r‖²."""
        return self.tau * retain_square if self.mode == "relative" else self.tau

    def denominator(self, retain_square: float) -> float:
        """``‖r‖² + τ``; infinite where it would be zero, so that the quotient is zero."""
        return (retain_square + self.amount(retain_square)) or inf

    def residue(self, retain_square: float) -> float:
        """``τ/(‖r‖²+τ)``: the share of the retain component that survives the projection."""
        denominator = self.denominator(retain_square)
        return 1.0 if denominator == inf else self.amount(retain_square) / denominator


def retain_orthogonal(x: Vector, gram: Gram, stabilizer: Stabilizer) -> Vector:
    """``(I − P_r^(τ)) x``, projected a second time where the first leaves rounding error behind.

    The coefficient k of the first projection carries a relative error of the Gram matrix, which
    is harmless until x is nearly parallel to r. There ``⟨x − k r, r⟩``, measured from the vector
    itself, should be exactly kτ; what differs from that is taken off k.
    """
    retain_square = gram(R, R)
    denominator = stabilizer.denominator(retain_square)
    k = gram(x, R) / denominator
    q = x - k * R
    if gram.measure is not None and gram.cancels(q):
        k += (gram.measure(q, R) - k * stabilizer.amount(retain_square)) / denominator
        q = x - k * R
    return q
