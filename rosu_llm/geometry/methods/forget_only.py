"""Unlearning without retain data: forget outside the span of retain gradients that were stored beforehand.

Before the first step the retain set is cut into k parts, and the mean gradient of each is stored: their span holds the
gradient of the whole set exactly, and k − 1 further directions in which parts of it differ. From then on

    v = −(I − P_M) f,   P_M the projector onto the stored gradients,

which is neutral to first order for every part of the retain set at the weights where its gradient was taken. It ages as
the weights move, and nothing repairs what second-order effects cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError
from ..gram import Gram
from ..slots import stored_slot
from ..subspace import Subspace
from ..vector import F, Vector
from .base import BaseRule, Inner, option


@dataclass(frozen=True, kw_only=True)
class ForgetOnly(BaseRule):
    """v = −(I − P_M) f."""

    directions: int = option(
        8, "forget_only: retain gradients to store before the first step, each of a part of the data."
    )

    passes = ("forget",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.directions, int) or self.directions < 1:
            raise ConfigError(f"directions={self.directions!r} must be a whole number ≥ 1.")

    @property
    def stored(self) -> int:
        return self.directions

    def protected(self, gram: Gram) -> Subspace:
        names = [name for name in map(stored_slot, range(self.directions)) if name in gram.names]
        return Subspace.spanned_by([Vector.named(name) for name in names], gram)

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        return -self.protected(gram).without(F)
