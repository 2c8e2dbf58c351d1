"""The passes over a window and the update they end in."""

from .amplify import Amplifier, Pull, resolve
from .engine import Closure, StepEngine
from .loop import UnlearningStep, guard_optimizer
from .outcome import Outcome
from .report import metrics, over_steps, pull_metrics

__all__ = [
    "Amplifier",
    "Closure",
    "Outcome",
    "Pull",
    "StepEngine",
    "UnlearningStep",
    "guard_optimizer",
    "metrics",
    "over_steps",
    "pull_metrics",
    "resolve",
]
