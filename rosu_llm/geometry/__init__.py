"""From Gram matrix to coefficients: the paper's mathematics, without tensors."""

from .calibration import pull_scale
from .coupling import Coupling, cosine, coupling
from .gram import Gram
from .projection import Stabilizer, retain_orthogonal
from .registry import METHODS, build_rule
from .rosu import Rosu
from .rule import Inner, Rule
from .schedules import BetaSchedule, RhoSchedule
from .vector import F, R, S, Vector

__all__ = [
    "METHODS",
    "BetaSchedule",
    "Coupling",
    "F",
    "Gram",
    "Inner",
    "R",
    "RhoSchedule",
    "Rosu",
    "Rule",
    "S",
    "Stabilizer",
    "Vector",
    "build_rule",
    "cosine",
    "coupling",
    "pull_scale",
    "retain_orthogonal",
]
