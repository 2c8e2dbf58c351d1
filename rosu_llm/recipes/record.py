"""What a run leaves about itself, for ``rosu report``, for resuming, and for whoever finds the folder later."""

from __future__ import annotations

import dataclasses
import json
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from ..files import write_atomically
from ..training.config import MethodArguments
from .settings import RunArguments

RECORD_FILE = "rosu_run.json"
SCHEMA = "rosu/run/1"

#: Of TrainingArguments, those that decide what comes out.
_TRAINING = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "weight_decay",
    "max_grad_norm",
    "optim",
    "bf16",
    "seed",
    "output_dir",
)


def run_settings(arguments: RunArguments, method: MethodArguments, training: Any) -> dict[str, Any]:
    """What was run: the data and the model, the method, and the training arguments that matter."""
    chosen = {name: getattr(training, name) for name in _TRAINING}
    return {
        **dataclasses.asdict(arguments),
        **method.method_dict(),
        **{name: getattr(value, "value", value) for name, value in chosen.items()},
    }


def write_record(trainer: Any, arguments: RunArguments, seconds: float) -> None:
    """Write ``trainer_state.json`` and ``rosu_run.json`` into the run's folder, on the main process."""
    if not trainer.is_world_process_zero():
        return
    trainer.save_state()
    record = {
        "schema": SCHEMA,
        "settings": run_settings(arguments, trainer.method_args, trainer.args),
        "processes": trainer.accelerator.num_processes,
        "layout": trainer.layout,
        "steps": trainer.state.global_step,
        "versions": {"rosu_llm": __version__, "python": platform.python_version(), **_versions()},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
    }
    text = json.dumps(record, indent=1, ensure_ascii=False, default=str)
    write_atomically(Path(trainer.args.output_dir) / RECORD_FILE, text + "\n")


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "accelerate", "peft", "deepspeed"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
