"""rosu_llm: make language models forget chosen training data while keeping the rest.

Importing the package is instant: names are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "AlternatingCorpora": "data.corpus",
    "ForgetRetainCollator": "data.pairing",
    "ForgetRetainDataset": "data.pairing",
    "MethodArguments": "training.config",
    "QuestionAnswerDataset": "data.question_answer",
    "ROSUConfig": "training.config",
    "ROSUTrainer": "training.trainer",
    "RepresentationConfig": "representation.config",
    "RepresentationTrainer": "representation.trainer",
    "RosuError": "errors",
    "TofuSettings": "evaluation.tofu.metrics",
    "UnlearningStep": "step.step",
    "WithAlternates": "data.third_answers",
    "evaluate_tofu": "evaluation.tofu.evaluate",
    "measure_coupling": "presentation.measure_coupling",
    "register_loss": "losses.registry",
}

__all__ = [
    "AlternatingCorpora",
    "ForgetRetainCollator",
    "ForgetRetainDataset",
    "MethodArguments",
    "QuestionAnswerDataset",
    "ROSUConfig",
    "ROSUTrainer",
    "RepresentationConfig",
    "RepresentationTrainer",
    "RosuError",
    "TofuSettings",
    "UnlearningStep",
    "WithAlternates",
    "__version__",
    "evaluate_tofu",
    "measure_coupling",
    "register_loss",
]

if TYPE_CHECKING:
    from .data.corpus import AlternatingCorpora
    from .data.pairing import ForgetRetainCollator, ForgetRetainDataset
    from .data.question_answer import QuestionAnswerDataset
    from .data.third_answers import WithAlternates
    from .errors import RosuError
    from .evaluation.tofu.evaluate import evaluate_tofu
    from .evaluation.tofu.metrics import TofuSettings
    from .losses.registry import register_loss
    from .presentation.measure_coupling import measure_coupling
    from .representation.config import RepresentationConfig
    from .representation.trainer import RepresentationTrainer
    from .step.step import UnlearningStep
    from .training.config import MethodArguments, ROSUConfig
    from .training.trainer import ROSUTrainer


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
