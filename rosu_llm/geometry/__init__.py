"""From Gram matrix to coefficients: the paper's mathematics, without tensors."""

from .coupling import Coupling, cosine, coupling
from .gram import Gram
from .methods.base import Inner, Rule
from .methods.registry import METHODS, build_rule
from .methods.rosu import Rosu
from .projection import Stabilizer, retain_orthogonal
from .vector import F, R, S, Vector

__all__ = [
    "METHODS",
    "Coupling",
    "F",
    "Gram",
    "Inner",
    "R",
    "Rosu",
    "Rule",
    "S",
    "Stabilizer",
    "Vector",
    "build_rule",
    "cosine",
    "coupling",
    "retain_orthogonal",
]
