"""How the pull βδ reaches the weights.

``direct``     w += βδ after the optimizer step: the paper's equation, right for SGD.
``optimizer``  the optimizer sees v − (β/η)δ. With the tied β that is v − u: the best reading of the
               paper's language-model runs, where AdamW rescales everything.
``matched``    w += βδ after the optimizer step, with βρ = κ·‖Δ_optimizer‖: the pull stays exactly
               retain-neutral and is as long as a fixed share of the step it accompanies.

Why not always ``direct``: tied, it moves the weights by η in total. AdamW moves them by about η·√p,
so at a billion parameters the pull is 3·10⁻⁵ of a step, which is nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch

from ..errors import ConfigError, unknown
from ..geometry import Inner, Vector
from ..space import ParameterSpace

MODES = ("auto", "direct", "optimizer", "matched")

#: Below this share of the optimizer's step the pull is a no-op worth a warning.
NEGLIGIBLE = 1e-3


@dataclass(frozen=True)
class Pull:
    """What was added after the optimizer step.

    Attributes:
        length: ‖βδ‖ as added to the weights.
        ratio: that length over the length of the optimizer's own step (0 where both are zero).
    """

    length: float
    ratio: float


@dataclass(frozen=True)
class Amplifier:
    """One of the three modes; build it with :func:`resolve`."""

    mode: str
    kappa: float = 0.5

    def in_gradient(self, inner: Inner, beta: float, learning_rate: float) -> Vector:
        """(β/η)δ in mode ``optimizer``; nothing otherwise, nor where there is no step.

        In the optimizer's metric δ is along D⁻¹q, which the optimizer makes of q: it is handed ρ q/‖q‖ instead.
        """
        if self.mode != "optimizer" or learning_rate == 0.0:
            return Vector()
        return (beta / learning_rate) * (inner.delta if inner.optimizer_input is None else inner.optimizer_input)

    def after_step(self, space: ParameterSpace, inner: Inner, beta: float, factor: float = 1.0) -> Pull:
        """Add the pull; ``factor`` in [0, 1] is the calibration's."""
        rho = inner.alpha * inner.direction_norm
        step = space.displacement()
        length = factor * (self.kappa * step if self.mode == "matched" else beta * rho)
        if length > 0.0:
            space.add((length / rho) * inner.delta, precise=inner.precise)
        return Pull(length, length / step if step > 0.0 else 0.0)


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step is −η times (an average of) the gradient, so that β keeps the paper's meaning."""
    return isinstance(optimizer, torch.optim.SGD) or type(optimizer).__name__.lower().startswith("sgd")


def resolve(
    mode: str,
    beta: str | float,
    kappa: float,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    alone: bool = False,
) -> Amplifier:
    """The amplifier for a configuration; ``auto`` needs the optimizer.

    ``auto`` is ``direct`` for SGD and for a β given as number or ``two_phase`` (which says how far to
    go), ``matched`` for adaptive optimizers with the tied β. Where the pull is ``alone`` (components: delta_only)
    there is no step to match, and ``optimizer`` takes the place of ``matched``.
    """
    if mode not in MODES:
        raise unknown("amplify", mode, MODES)
    if not isinstance(kappa, (int, float)) or not (kappa >= 0.0 and isfinite(kappa)):
        raise ConfigError(f"kappa={kappa!r} must be a number ≥ 0: the pull's share of the optimizer's step, e.g. 0.5.")
    if mode == "matched" and beta != "tied":
        raise ConfigError(
            f"amplify='matched' sets β itself, so beta={beta!r} would be ignored. Use kappa for the strength, "
            "or amplify='direct' to keep that beta."
        )
    if mode == "matched" and alone:
        raise ConfigError(
            "amplify='matched' measures the pull by the optimizer's step, and components='delta_only' takes none. Use "
            "amplify='optimizer', or 'direct' with a numeric beta."
        )
    if mode == "auto":
        if beta != "tied":
            mode = "direct"
        elif optimizer is None:
            raise ConfigError("amplify='auto' depends on the optimizer: pass one, or name the mode.")
        else:
            mode = "direct" if is_plain_sgd(optimizer) else "optimizer" if alone else "matched"
    return Amplifier(mode, kappa)
