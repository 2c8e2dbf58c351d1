"""One run of an experiment: a task starts it; then train, measure, check, clean up, record.

What goes wrong is recorded and ends nothing else.

Finished cells of a grid are kept as one JSON file each, written beside and renamed, so that a killed run leaves whole
files or none.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .. import __version__
from ..compat import empty_device_cache
from ..errors import NonFiniteError, RosuError, one_line
from ..files import write_atomically

#: How an attempt can end; one whose earlier record is used again is ``kept``.
DONE, FAILED, KEPT, PRUNED = "done", "failed", "kept", "pruned"
#: Further states of a trial of a search; a killed one ended with its process and was queued again.
KILLED, RUNNING, WAITING = "killed", "running", "waiting"

Figures = Mapping[str, float]
#: Is told how many steps are done, and of how many.
Steps = Callable[[int, int], None]
#: Measures of answers → headings; the last two need held-out data.
ANSWER_COLUMNS = {
    "forget_prob": "forget prob",
    "forget_em": "forget EM",
    "retain_prob": "retain prob",
    "retain_em": "retain EM",
    "holdout_em": "holdout EM",
    "mia_auc": "MIA AUC",
}


class Started(NamedTuple):
    """A run before its first step.

    Attributes:
        trainer: None for a reference model, which is trained already.
        measure: every figure of the model as it is at the moment.
        glance: HM of memorisation and utility of the model as it is, where that is cheaper than ``measure``.
        details: what else to keep of the run, if anything: the ``log`` of every step, and ``answers`` as split,
            question, truth, answer.
    """

    trainer: Any
    measure: Callable[[], Figures]
    glance: Callable[[], float] | None = None
    details: Callable[[], dict[str, Any]] | None = None


class Task(Protocol):
    """A model, data and measures that settings can be tried on.

    Attributes:
        base: settings that every run starts from.
        columns: measure → heading, in the order of the table.
        plotted: the measures that line plots show.
        digits: decimals of the tables.
        notes: lines below every table.
        references: models to compare with, name → label: ``before`` unlearning, trained on ``retain_only``.
    """

    base: Mapping[str, Any]
    columns: Mapping[str, str]
    plotted: tuple[str, ...]
    digits: int
    notes: tuple[str, ...]
    references: Mapping[str, str]

    def identity(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What the figures depend on besides the settings: sizes, contents of files."""

    def reference_seeds(self, seeds: Sequence[int]) -> list[int]:
        """The seeds to measure the reference models with."""

    def reference_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that matter to the reference models."""

    def refer(self, name: str, seed: int, steps: Steps) -> Started:
        """The reference model ``name``."""

    def start(self, values: Mapping[str, Any], seed: int, folder: Path, steps: Steps) -> Started:
        """Load the model and the data, and build the trainer, which writes to ``folder``."""


class AttemptObserver(Protocol):
    """Is told how the attempts of an experiment go."""

    def started(self, label: str) -> None:
        return

    def steps(self, done: int, total: int) -> None:
        return

    def finished(self, label: str, status: str, text: str) -> None:
        return


class Unobserved(AttemptObserver):
    """Tells nobody."""


@dataclass(frozen=True)
class Attempt:
    """How a run ended.

    Attributes:
        status: ``done`` with metrics, or ``failed`` with the line of the error.
        seconds: from loading the model to the last measure.
        training_seconds: of training alone; for a reference model, of making it.
    """

    status: str
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    training_seconds: float = 0.0
    error: str | None = None
    log: list[dict[str, float]] = field(default_factory=list)
    answers: list[dict[str, str]] = field(default_factory=list)


#: Decides what stays of a run, given its start, figures and seconds of training: saves its model, or returns False.
Keep = Callable[[Started, Figures, float], bool]


def attempt(
    start: Callable[[], Started], folder: Path, steps: Steps, keep: Keep, *, reraise: tuple[type[Exception], ...] = ()
) -> Attempt:
    """Run ``start`` in ``folder``, which is removed in the end unless ``keep`` returns True.

    Exceptions in ``reraise`` are no failure and concern the caller.
    """

    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    begun, kept = time.perf_counter(), False
    try:
        kept, result = _run(start, steps, keep)
    except reraise:
        raise
    except Exception as error:
        name = "" if isinstance(error, RosuError) else f"{type(error).__name__}: "  # errors of other packages
        result = {"status": FAILED, "error": (name + one_line(error))[:500]}
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
        gc.collect()  # the trainer's hooks and callbacks are cycles that only the collector sees
        empty_device_cache()
    return Attempt(seconds=round(time.perf_counter() - begun, 2), **result)


def _run(start: Callable[[], Started], steps: Steps, keep: Keep) -> tuple[bool, dict[str, Any]]:
    begun = time.perf_counter()
    started = start()
    if started.trainer is not None:
        begun = time.perf_counter()
        train_quietly(started.trainer, steps)
    seconds = time.perf_counter() - begun
    metrics = dict(started.measure())
    broken = [name for name, value in metrics.items() if not math.isfinite(value)]
    if broken:
        raise NonFiniteError(f"The model is broken: {', '.join(broken)} is not finite after training.")
    more = started.details() if started.details else {}
    kept = keep(started, metrics, seconds)
    return kept, {"status": DONE, "metrics": metrics, "training_seconds": seconds, **more}


def train_quietly(trainer: Any, steps: Steps, resume: Any = None) -> None:
    """Train without the printing of Trainer's own callbacks; ``resume`` as ``resume_from_checkpoint``."""
    from transformers import PrinterCallback, ProgressCallback, TrainerCallback

    class StepsCallback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps(state.global_step, state.max_steps)

    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(StepsCallback())
    trainer.train(**({} if resume is None else {"resume_from_checkpoint": resume}))


def cell_key(task: Mapping[str, Any], settings: Mapping[str, Any], seed: int) -> str:
    """A name for everything that the figures of a cell depend on, the package's version included."""
    content = {"task": task, "settings": settings, "seed": seed, "version": __version__}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Record(Attempt):
    """What is kept of a cell.

    Attributes:
        label: the row it was first run for; other grids may share the cell.
        model: folder of the kept model.
    """

    key: str
    label: str
    seed: int
    model: str | None = None
    task: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    version: str = __version__


class CellStore:
    """The records below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Record | None:
        """The record of a cell; a file that is no record (edited, cut off by a full disk) counts as none."""
        try:
            content = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            record = Record(**content)
        except (OSError, ValueError, TypeError):
            return None
        return record if record.key == key and record.status in (DONE, FAILED) else None

    def put(self, record: Record) -> None:
        """Keep a cell."""
        text = json.dumps(asdict(record), indent=1, ensure_ascii=False, default=str)
        write_atomically(self.folder / f"{record.key}.json", text + "\n")
