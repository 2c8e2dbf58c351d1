"""The passes over a window and the update they end in."""

from .calibration import Calibration, pull_factor
from .engine import Closure, Outcome, StepEngine
from .logs import metrics, over_steps, pull_metrics
from .pull import Amplifier, Pull, resolve
from .schedules import BetaSchedule, RhoSchedule
from .step import UnlearningStep, guard_optimizer

__all__ = [
    "Amplifier",
    "BetaSchedule",
    "Calibration",
    "Closure",
    "Outcome",
    "Pull",
    "RhoSchedule",
    "StepEngine",
    "UnlearningStep",
    "guard_optimizer",
    "metrics",
    "over_steps",
    "pull_factor",
    "pull_metrics",
    "resolve",
]
