"""From Gram matrix to coefficients: the paper's mathematics, without tensors."""

from .coupling import Coupling, cosine, coupling
from .gram import Gram
from .methods.base import BaseRule, Inner
from .methods.registry import METHODS, build_rule
from .methods.rosu import Rosu
from .projection import Stabilizer, retain_orthogonal
from .vector import F, R, S, Vector

__all__ = [
    "METHODS",
    "BaseRule",
    "Coupling",
    "F",
    "Gram",
    "Inner",
    "R",
    "Rosu",
    "S",
    "Stabilizer",
    "Vector",
    "build_rule",
    "cosine",
    "coupling",
    "retain_orthogonal",
]
