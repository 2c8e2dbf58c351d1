"""SSD, selective synaptic dampening (Foster, Schoepf, Brintrup: AAAI 2024, equations 4 and 7).

Nothing is trained. With F the diagonal of the Fisher information, estimated by squared gradients of the loss,

    F_f = mean over forget samples (∂ℓ/∂w)²,    F_r = mean over retain samples (∂ℓ/∂w)²,
    w ← w · min(1, λ F_r / F_f)   where F_f > α F_r,   w unchanged elsewhere.

One sweep goes over the data; every step adds to the two sums, and the last one dampens. `fisher: sample` squares the
gradient of each sample's mean answer loss, which is the estimate that the equation asks for (with the labels of the
data: the empirical Fisher). `fisher: window` squares the gradient of a whole window, as the released code does with
mini-batches: it is cheaper by the size of a window, and smaller by up to as much where gradients of samples disagree.
The authors divide by the mean over the *whole* training set in place of the retain set.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from ....errors import ConfigError, unknown
from ...gram import Gram
from ...vector import Vector
from ..base import BaseRule, Inner, option

FISHERS = ("sample", "window")


@dataclass(frozen=True, kw_only=True)
class SSD(BaseRule):
    """w · min(1, λ F_r/F_f) where F_f > α F_r."""

    ssd_alpha: float = option(10.0, "ssd: α, weights are dampened where F_f > α F_r.")
    ssd_lambda: float = option(1.0, "ssd: λ, they are multiplied by min(1, λ F_r/F_f).")
    fisher: str = option("sample", "ssd: squared gradients of each sample, or of each window (cheaper).")

    losses = {"forget": "nll", "retain": "nll"}  # noqa: RUF012
    sweeps = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("ssd_alpha", self.ssd_alpha), ("ssd_lambda", self.ssd_lambda)):
            if not (value > 0.0 and isfinite(value)):
                raise ConfigError(
                    f"{name}={value!r} must be a positive number, e.g. {10.0 if 'alpha' in name else 1.0}."
                )
        if self.fisher not in FISHERS:
            raise unknown("fisher", self.fisher, FISHERS)

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        raise TypeError("ssd makes no gradient for an optimizer")
