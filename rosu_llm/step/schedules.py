"""How ρ and β move over a run (paper, appendix on implementation: "ROSU recipe").

β is ``tied`` (β_t = η_t/ρ_t: no search), a number, or ``two_phase`` (a short warm-up 0.001 → 0.06,
then 0.012). ρ is ``constant`` or follows half a ``cosine`` down to zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, isfinite, pi

from ..errors import ConfigError, unknown

RHO_SCHEDULES = ("constant", "cosine")
BETA_NAMES = ("tied", "two_phase")


@dataclass(frozen=True)
class RhoSchedule:
    """ρ at a given step of a run of known length."""

    rho: float
    kind: str = "constant"

    def __post_init__(self) -> None:
        if not isinstance(self.rho, (int, float)) or isinstance(self.rho, bool):
            raise ConfigError(f"rho={self.rho!r} is a {type(self.rho).__name__}, not a number: give e.g. 0.4.")
        if self.kind not in RHO_SCHEDULES:
            raise unknown("rho_schedule", self.kind, RHO_SCHEDULES)
        if not (self.rho > 0.0 and isfinite(self.rho)):
            raise ConfigError(
                f"rho={self.rho!r} is no perturbation radius: it must be positive and finite, e.g. 0.4. "
                "For no perturbation at all use method='graddiff' or method='ft'."
            )

    def at(self, step: int, total: int) -> float:
        """ρ_t for 0 ≤ step < total; positive throughout."""
        if self.kind == "constant" or total <= 0:
            return self.rho
        return 0.5 * self.rho * (1.0 + cos(pi * min(step, total - 1) / total))


@dataclass(frozen=True)
class BetaSchedule:
    """β at a given step.

    Args:
        beta: ``tied``, ``two_phase`` or a number ≥ 0.
        start, high, low: the three levels of ``two_phase``.
        warmup_ratio: share of the run that the climb from ``start`` to ``high`` takes.
    """

    beta: str | float = "tied"
    start: float = 0.001
    high: float = 0.06
    low: float = 0.012
    warmup_ratio: float = 0.1

    def __post_init__(self) -> None:
        if isinstance(self.beta, str):
            if self.beta not in BETA_NAMES:
                raise ConfigError(f"beta={self.beta!r} is not understood: give 'tied', 'two_phase' or a number ≥ 0.")
        elif not (self.beta >= 0.0 and isfinite(self.beta)):
            raise ConfigError(
                f"beta={self.beta!r} would pull the weights towards remembering: give a number ≥ 0, or 'tied'."
            )
        for name in ("start", "high", "low"):
            if not (getattr(self, name) >= 0.0 and isfinite(getattr(self, name))):
                raise ConfigError(f"beta_{name}={getattr(self, name)!r} must be a number ≥ 0.")
        if not 0.0 <= self.warmup_ratio <= 1.0:
            raise ConfigError(f"beta_warmup_ratio={self.warmup_ratio!r} must lie between 0 and 1.")

    @property
    def tied(self) -> bool:
        """Whether β follows the learning rate."""
        return self.beta == "tied"

    def at(self, step: int, total: int, learning_rate: float, rho: float) -> float:
        """β_t; zero wherever the learning rate is, since then there is no step to amplify."""
        if learning_rate == 0.0:
            return 0.0
        if isinstance(self.beta, (int, float)):
            return float(self.beta)
        if self.beta == "tied":
            return learning_rate / rho
        warmup = max(1, round(self.warmup_ratio * total))
        if step < warmup:
            return self.start + (self.high - self.start) * step / max(1, warmup - 1)
        return self.low
