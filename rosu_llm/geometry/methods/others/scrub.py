"""SCRUB (Kurmanji, Triantafillou, Hayes, Triantafillou: "Towards Unbounded Machine Unlearning", 2023, equation 3).

The initial model is the teacher p₀. Epochs alternate between

    min:  v =  ∇[ α KL(p₀ ‖ p)(x_r) + γ L(x_r, y_r) ]      on data to keep
    max:  v = −∇ KL(p₀ ‖ p)(x_f)                           on data to forget

for `scrub_max_epochs` max epochs; all epochs after those are min epochs. An epoch is that of every other method: as
many samples as there are to forget (times ``retain_per_forget`` in a min epoch), not the whole retain set.

The authors begin with a max epoch. At the initial weights KL(p₀ ‖ p) is zero and so is its gradient: without dropout or
batch statistics, which their image models have, there would be no direction, and Adam would make steps of rounding
noise. Here the first epoch is a min epoch, whose task loss moves the weights. Their code softens both distributions by
a temperature; the paper's equation, followed here, has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from ....errors import ConfigError
from ...gram import Gram
from ...slots import FORGET
from ...vector import F, R, Vector
from ..base import BaseRule, Inner, option


@dataclass(frozen=True, kw_only=True)
class Scrub(BaseRule):
    """v = r in a min epoch, v = −f in a max epoch."""

    scrub_max_epochs: int = option(2, "scrub: max epochs, of which each follows a min epoch; the rest are min epochs.")
    scrub_kl_weight: float = option(0.5, "scrub: α, of the divergence from the initial model on data to keep.")
    scrub_task_weight: float = option(1.0, "scrub: γ, of the negative log-likelihood on data to keep.")

    losses = {"forget": "divergence", "retain": "divergence_and_task"}  # noqa: RUF012
    alternates = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.scrub_max_epochs, int) or self.scrub_max_epochs < 1:
            raise ConfigError(
                f"scrub_max_epochs={self.scrub_max_epochs!r} must be a whole number ≥ 1: without a max epoch nothing "
                "is forgotten (that is method='ft')."
            )
        for name in ("scrub_kl_weight", "scrub_task_weight"):
            if not (getattr(self, name) >= 0.0 and isfinite(getattr(self, name))):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a number ≥ 0.")
        if self.scrub_task_weight == 0.0:
            raise ConfigError(
                "scrub_task_weight=0 leaves the divergence from the initial model alone, whose gradient is zero at the "
                "initial weights: no step is ever taken. Give a positive number, e.g. 1."
            )

    def parts_in(self, epoch: int) -> tuple[str, ...]:
        raises = epoch % 2 == 1 and epoch < 2 * self.scrub_max_epochs
        return ("forget",) if raises else ("retain",)

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        return -F if FORGET in gram.names else R
