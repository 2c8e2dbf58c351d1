"""Stop pulling when the forgotten data looks like data never seen.

Every unlearning method overshoots sooner or later: the forget loss climbs far above that of unseen data, and an
attacker reads membership from the excess. The calibrated pull is multiplied by

    clip((L_target − L_forget)/margin, 0, 1)

where L_target is the loss on held-out examples of the same kind (or a fixed number). It fades as the forget loss
reaches that level and returns if it falls back. This is an addition to the paper, whose protocol has no held-out set
for tuning; label results that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite, nan

from ..errors import ConfigError


def pull_factor(target_loss: float, forget_loss: float, margin: float) -> float:
    """Factor in [0, 1] on β; 0 where either loss is not a number, so that a broken estimate never pulls."""
    check_margin(margin)
    gap = target_loss - forget_loss
    if not isfinite(gap):
        return 0.0
    return min(1.0, max(0.0, gap / margin))


def check_margin(margin: float) -> None:
    """Refuse a margin that is not positive."""
    if not margin > 0.0:
        raise ConfigError(
            f"calibrate_margin={margin!r} must be positive: it is the loss gap at which the pull is full."
        )


class Calibration:
    """The pull's factor, step by step.

    Args:
        target: the loss of unseen data: a number, or a function that measures it.
        margin: loss gap at which the pull is full.
        every: steps between measurements of the target.
        forget_loss: the forget loss on the target's scale, from the losses of a step; that of the step unless given.
    """

    def __init__(
        self,
        target: float | Callable[[], float],
        *,
        margin: float = 1.0,
        every: int = 1,
        forget_loss: Callable[[Mapping[str, float]], float] | None = None,
    ) -> None:
        check_margin(margin)
        self._measure = target if callable(target) else None
        self._margin, self._every = margin, every
        self._forget_loss = forget_loss or (lambda losses: losses["forget"])
        self.target: float | None = None if callable(target) else float(target)

    @property
    def measures(self) -> bool:
        """Whether the target is measured, not given."""
        return self._measure is not None

    def refresh(self, step: int) -> None:
        """Measure the target if it is due at this step."""
        if self._measure is not None and (self.target is None or step % self._every == 0):
            self.target = self._measure()

    def factor(self, losses: Mapping[str, float]) -> float:
        """The factor on β, from the losses at w."""
        return pull_factor(nan if self.target is None else self.target, self._forget_loss(losses), self._margin)
