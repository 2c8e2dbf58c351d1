"""What an audit measures of a model in memory: TOFU's figures, or accuracies on WMDP and MMLU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ...data.chat_format import ChatFormat, find_format
from ...errors import ConfigError
from ...evaluation.model_identity import Model
from ...evaluation.processes import started_processes
from ...evaluation.tofu.evaluate import evaluate_tofu
from ...evaluation.tofu.metrics import TofuSettings
from ...evaluation.wmdp.evaluate import WmdpSettings, evaluate_loaded, require_lm_eval, write_tasks

#: TOFU's figures of what is remembered of the forget set: larger is more.
REMEMBERED = (
    "forget_Q_A_Prob",
    "forget_Q_A_PARA_Prob",
    "forget_Q_A_ROUGE",
    "extraction_strength",
    "exact_memorization",
    "forget_truth_ratio_prob_mean",
    "mia_loss",
    "mia_zlib",
    "mia_min_k",
    "mia_min_k_plus_plus",
)


class AuditMeasure(Protocol):
    """Figures of a model; ``remembered`` names those that say how much of the forget set is there."""

    @property
    def benchmark(self) -> str: ...

    @property
    def remembered(self) -> tuple[str, ...]: ...

    def conditions(self) -> dict[str, Any]:
        """All that determines the figures beside the model."""
        ...

    def chat_format(self, tokenizer: Any, source: str) -> ChatFormat | None:
        """How questions are put to the model."""
        ...

    def __call__(self, model: Any, tokenizer: Any, which: Model, place: Path, name: str) -> dict[str, float]:
        """Measure; ``place`` is a folder for results on the way, ``name`` tells this state of the weights."""
        ...


@dataclass(frozen=True)
class TofuFigures:
    """TOFU's figures by OpenUnlearning's names; shared among processes where there are several."""

    settings: TofuSettings
    retain: Path | None = None  # results of the retain model, for forget quality and privleak

    benchmark = "tofu"

    @property
    def remembered(self) -> tuple[str, ...]:
        return tuple(name for name in REMEMBERED if name in self.settings.metrics)

    def conditions(self) -> dict[str, Any]:
        without = ("batch_size", "batch_tokens")
        return {key: value for key, value in asdict(self.settings).items() if key not in without}

    def chat_format(self, tokenizer: Any, source: str) -> ChatFormat | None:
        return find_format(self.settings.chat_format, tokenizer, source)

    def __call__(self, model: Any, tokenizer: Any, which: Model, place: Path, name: str) -> dict[str, float]:
        return evaluate_tofu(
            model, tokenizer, self.settings, place, retain=self.retain, identity=name, name=which.source
        )


@dataclass(frozen=True)
class WmdpFigures:
    """Accuracies of lm-eval's tasks; ``definitions`` is a folder of theirs, or None for the installed ones."""

    settings: WmdpSettings
    data: Path | None
    definitions: Path | None

    benchmark = "wmdp"

    @property
    def remembered(self) -> tuple[str, ...]:
        return tuple(task for task in self.settings.tasks if task != "mmlu")

    def conditions(self) -> dict[str, Any]:
        asked = {"tasks": list(self.settings.tasks), "limit": self.settings.limit, "seed": self.settings.seed}
        return {**asked, "data": None if self.data is None else str(self.data)}

    def chat_format(self, tokenizer: Any, source: str) -> ChatFormat | None:
        return None

    def __call__(self, model: Any, tokenizer: Any, which: Model, place: Path, name: str) -> dict[str, float]:
        training = model.training
        model.eval()
        try:
            found = evaluate_loaded(model, tokenizer, self.settings, self.definitions, builtin=self.data is None)
        finally:
            model.train(training)
        scores: Mapping[str, Any] = found["scores"]
        return {task: float(score["accuracy"]) for task, score in scores.items()}


@contextmanager
def wmdp_figures(settings: WmdpSettings, data: Path | None) -> Iterator[WmdpFigures]:
    """The measure, with definitions of the tasks over the files of ``data`` while it is used."""
    require_lm_eval()
    if started_processes() > 1:
        raise ConfigError("Audits with --benchmark wmdp run on one process: leave --num-processes out.")
    if data is None:
        yield WmdpFigures(settings, None, None)
        return
    with tempfile.TemporaryDirectory() as scratch:
        write_tasks(data, settings.tasks, Path(scratch))
        yield WmdpFigures(settings, data, Path(scratch))
