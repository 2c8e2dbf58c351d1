"""Stop pulling when the forgotten data looks like data never seen.

Every unlearning method overshoots sooner or later: the forget loss climbs far above that of unseen
data, and an attacker reads membership from the excess. The calibrated pull is scaled by

    clip((L_target − L_forget)/margin, 0, 1)

where L_target is the loss on held-out examples of the same kind (or a fixed number). It fades as the
forget loss reaches that level and returns if it falls back. This is an addition to the paper, whose
protocol has no held-out set for tuning; label results that use it.
"""

from __future__ import annotations

from math import isfinite

from ..errors import ConfigError


def pull_scale(target_loss: float, forget_loss: float, margin: float) -> float:
    """Factor in [0, 1] on β; 0 where either loss is not a number, so a broken estimate never pulls."""
    if not margin > 0.0:
        raise ConfigError(
            f"calibrate_margin={margin!r} must be positive: it is the loss gap at which the pull is full."
        )
    gap = target_loss - forget_loss
    if not isfinite(gap):
        return 0.0
    return min(1.0, max(0.0, gap / margin))
