"""One model through lm-eval: multiple-choice tasks, 0-shot, each process answering its share of the questions.

What is kept of every question is whether the answer was right, so that two models can be compared question by question;
what is kept of every task is a hash of its prompts and targets, so that results over other questions are told apart.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...errors import ConfigError, DataError
from ..model_identity import Model
from .delta_score import Score

VERSIONS = ("rosu-llm", "lm-eval", "torch", "transformers", "datasets", "accelerate")


@dataclass(frozen=True)
class Settings:
    """How the questions are asked; ``limit`` is the number of questions per task (for MMLU, per subject)."""

    tasks: tuple[str, ...]
    limit: int | None = None
    dtype: str = "auto"
    device: str | None = None
    batch_size: str = "8"
    seed: int = 0
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Evaluation:
    """What came out: scores per task, and per leaf task its version, hash, data set and the answers (``1`` right)."""

    scores: dict[str, Score]
    leaves: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    versions: dict[str, str]
    date: str

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Evaluation:
        """Inverse of :meth:`as_json`."""
        scores = {task: Score(**score) for task, score in value["scores"].items()}
        return cls(scores, value["leaves"], value["settings"], value["versions"], value["date"])

    @property
    def hashes(self) -> dict[str, str]:
        """Leaf task → hash of its prompts and targets."""
        return {name: leaf["hash"] for name, leaf in sorted(self.leaves.items())}

    def answers(self, task: str) -> str:
        """A ``1`` or ``0`` per question of a task, subjects in alphabetical order."""
        return "".join(leaf["answers"] for _, leaf in sorted(self.leaves.items()) if leaf["of"] == task)


def require_lm_eval() -> None:
    """Say what to install when lm-eval is absent."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("Evaluation on WMDP and MMLU needs lm-eval: pip install 'rosu-llm[eval]'.")


def device_type(device: str | None) -> str:
    """The kind of device that will be used; an absent one is an error here rather than a silent change to another."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (number and not number.isdigit()):
        raise ConfigError(f"--device {device!r} is not one of cpu, cuda, cuda:N, mps.")
    present = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[kind]
    if int(number or 0) >= present:
        raise ConfigError(f"--device {device} is not here: torch sees {present} {kind} device(s).")
    return kind


def evaluate(model: Model, settings: Settings, include: Path | None, *, builtin: bool) -> Evaluation | None:
    """Run the tasks; the result on the first process, None on the others.

    Task definitions come from the folder ``include``, and with ``builtin`` from lm-eval for names not defined there.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    logging.getLogger("lm_eval.evaluator").setLevel(logging.ERROR)  # it warns per subject that 0-shot was asked for
    manager = TaskManager(include_path=str(include) if include else None, include_defaults=builtin)
    lm = _load(model, settings)
    try:
        raw = simple_evaluate(
            model=lm,
            tasks=list(settings.tasks),
            num_fewshot=0,
            limit=settings.limit,
            log_samples=True,
            task_manager=manager,
            random_seed=settings.seed,
            numpy_random_seed=settings.seed,
            torch_random_seed=settings.seed,
            fewshot_random_seed=settings.seed,
        )
    except OSError as error:
        raise DataError(
            f"The tasks {', '.join(settings.tasks)} could not be loaded ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}). Without access to cais/wmdp and cais/mmlu on the hub, pass --data-dir."
        ) from error
    if raw is None:
        return None
    used = {
        "dtype_used": str(lm.model.dtype).removeprefix("torch."),
        "device_used": lm.device.type,
        "processes": lm.world_size,
    }
    return _digest(raw, {**asdict(settings), "num_fewshot": 0, **used})


def _load(model: Model, settings: Settings) -> Any:
    from accelerate import PartialState
    from lm_eval.models.huggingface import HFLM

    gc.collect()  # a model evaluated before may still hold its memory
    lm = HFLM(
        pretrained=model.source,
        revision=model.revision,
        dtype=settings.dtype,
        device=settings.device or device_type(None),
        batch_size=settings.batch_size,
        trust_remote_code=settings.trust_remote_code,
        use_safetensors=True,
    )
    state = PartialState()
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != started:
        raise ConfigError(
            f"{started} processes were started but accelerate sees {state.num_processes}: on CPUs pass --device cpu to "
            "--num-processes, or set ACCELERATE_USE_CPU=true."
        )
    # lm-eval shares the questions only where it sees several GPUs on this machine, and numbers processes per machine;
    # elsewhere every process would silently answer everything.
    lm._rank, lm._world_size = state.process_index, state.num_processes
    return lm


def _digest(raw: Mapping[str, Any], settings: dict[str, Any]) -> Evaluation:
    tasks = settings["tasks"]
    leaves: dict[str, dict[str, Any]] = {}
    for name, samples in sorted(raw["samples"].items()):
        ordered = sorted(samples, key=lambda sample: sample["doc_id"])
        text = "\n".join(repr((sample["arguments"], sample["target"])) for sample in ordered)
        leaves[name] = {
            "of": name if name in tasks else "mmlu",
            "version": raw["versions"].get(name),
            "hash": f"sha256:{hashlib.sha256(text.encode()).hexdigest()}",
            "dataset": raw["configs"][name].get("dataset_path"),
            "questions": len(ordered),
            "available": raw["n-samples"][name]["original"],
            "answers": "".join("1" if sample["acc"] else "0" for sample in ordered),
        }
    scores = {task: _score(task, raw["results"][task], leaves) for task in tasks}
    packages = {name: version(name) for name in VERSIONS}
    return Evaluation(scores, leaves, settings, packages, datetime.now(timezone.utc).isoformat(timespec="seconds"))


def _score(task: str, metrics: Mapping[str, Any], leaves: Mapping[str, Mapping[str, Any]]) -> Score:
    answers = "".join(leaf["answers"] for leaf in leaves.values() if leaf["of"] == task)
    accuracy = answers.count("1") / len(answers)
    if abs(metrics["acc,none"] - accuracy) > 1e-9:
        raise DataError(
            f"lm-eval reports {metrics['acc,none']:.6f} for {task}, its {len(answers)} answers give {accuracy:.6f}: "
            "the task's definition must average over questions (weight_by_size: true)."
        )
    stderr = metrics.get("acc_stderr,none")
    return Score(accuracy, stderr if isinstance(stderr, float) else None, len(answers))
