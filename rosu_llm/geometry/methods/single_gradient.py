"""Methods of one gradient: fine-tuning on the retain data (``ft``), gradient ascent on the forget data (``ng``)."""

from __future__ import annotations

from dataclasses import dataclass

from ..gram import Gram
from ..vector import F, R, Vector
from .base import BaseRule, Inner


@dataclass(frozen=True)
class FineTune(BaseRule):
    """v = r: retain descent alone."""

    passes = ("retain",)

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        return R


@dataclass(frozen=True)
class NegativeGradient(BaseRule):
    """v = −f: forget ascent alone."""

    passes = ("forget",)

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        return -F
