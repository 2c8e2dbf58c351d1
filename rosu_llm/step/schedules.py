"""How ρ and β move over a run (paper, appendix on implementation: "ROSU recipe").

β is ``tied`` (β_t = η_t/ρ_t: no search), a number, or ``two_phase`` (a short warm-up 0.001 → 0.06,
then 0.012). ρ is ``constant``, follows half a ``cosine`` down to zero, or fits itself (:class:`AutoRadius`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import cos, isfinite, pi, sqrt

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


class AutoRadius:
    """The ρ at which the perturbation raises the retain loss by a given share of it.

    A retain-orthogonal δ raises it to second order only, L_r(w+δ) − L_r(w) ≈ ½‖δ‖²c, so the radius that would have met
    the share is ‖δ‖√(wanted/rise). ρ follows it, by a bounded factor per step, and starts at a share of ‖w‖.

    Args:
        share: (L_r(w+δ) − L_r(w))/L_r(w) to aim at.
    """

    #: ρ/‖w‖ at the first step, and the range it stays in.
    START, LOWEST, HIGHEST = 1e-3, 1e-6, 0.1
    #: The largest factor between two steps.
    FACTOR = 1.5

    def __init__(self, share: float) -> None:
        if not (share > 0.0 and isfinite(share)):
            raise ConfigError(f"rho_share={share!r} must be positive: the rise of the retain loss at w+δ, e.g. 0.1.")
        self.share = share
        #: What a resumed run must know: the present ρ, and ‖w‖ at the first step.
        self.rho: float | None = None
        self.size = 0.0
        #: What the last step had: its ρ, and by which share of it the retain loss rose.
        self.seen: dict[str, float] = {}

    def at(self, weight_norm: Callable[[], float]) -> float:
        """ρ of the step that begins."""
        if not self.size:
            self.size = weight_norm() or 1.0
        if self.rho is None:
            self.rho = self.START * self.size
        return self.rho

    def observe(self, losses: Mapping[str, float], length: float) -> None:
        """Follow what a δ of the given length did to the retain loss."""
        self.seen = {}
        if self.rho is None or "surrogate" not in losses or length <= 0.0:
            return
        wanted, rise = self.share * losses["retain"], losses["surrogate"] - losses["retain"]
        self.seen = {"perturb/rho": self.rho}
        if losses["retain"] > 0.0:
            self.seen["perturb/rise"] = rise / losses["retain"]
        fitting = length * sqrt(wanted / rise) if rise > 0.0 and wanted > 0.0 else self.FACTOR * self.rho
        moved = min(max(fitting, self.rho / self.FACTOR), self.rho * self.FACTOR)
        self.rho = min(max(moved, self.LOWEST * self.size), self.HIGHEST * self.size)


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
