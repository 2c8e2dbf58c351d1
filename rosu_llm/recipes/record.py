"""What a run leaves about itself: ``rosu_run.json`` for whoever finds the folder, and its settings in checkpoints.

A checkpoint holds weights, optimizer and schedule, but not the method or the data. A run resumed with another method
would be the result of neither; a new learning rate would be ignored, since the optimizer's state has its own; another
model or adapter fails deep inside a library. So every checkpoint stores the settings of its run, and a run resumes only
with the settings it was started with.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .. import __version__
from ..compat import installed_versions
from ..data.sources import local_file, named_rows
from ..errors import ConfigError, DataError
from ..files import changed_conditions, digest, read_json, write_atomically
from ..training.checkpoints import STATE_FILE
from ..training.config import MethodArguments, ROSUConfig
from ..training.supported import deciding
from .settings import RunArguments

logger = logging.getLogger(__name__)

RECORD_FILE = "rosu_run.json"
SCHEMA = "rosu/run/1"

_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "deepspeed")
#: The TrainingArguments that affect the result.
_TRAINING = (
    "learning_rate lr_scheduler_type warmup_steps num_train_epochs max_steps per_device_train_batch_size "
    "gradient_accumulation_steps weight_decay max_grad_norm optim bf16 seed output_dir"
).split()
#: May change: the run's length, where it writes, how a step is divided into batches, and how it is computed.
_FREE = (
    "max_steps num_train_epochs output_dir overwrite allow_changed per_device_train_batch_size "
    "gradient_accumulation_steps attn_implementation trust_remote_code"
).split()
#: Restored with the optimizer, whatever the settings say.
_IN_OPTIMIZER = "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon optim".split()
_FILES = ("forget_data", "retain_data", "holdout_data", "budget_data", "refusals", "alternates")
_SOURCES = {*_FILES, "model_name_or_path", "chat_format", "base_model", "memory_file"}


def run_settings(arguments: RunArguments, method: MethodArguments, training: Any) -> dict[str, Any]:
    """The run's data and model, its method, and the training arguments that affect the result."""
    chosen = {name: getattr(training, name) for name in _TRAINING}
    return {
        **dataclasses.asdict(arguments),
        **method.method_dict(),
        **{name: getattr(value, "value", value) for name, value in chosen.items()},
    }


def write_record(trainer: Any, arguments: RunArguments, seconds: float) -> None:
    """Write ``trainer_state.json`` and ``rosu_run.json`` into the run's folder."""
    trainer.save_state()
    record = {
        "schema": SCHEMA,
        "settings": run_settings(arguments, trainer.method_args, trainer.args),
        "processes": trainer.accelerator.num_processes,
        "layout": trainer.layout,
        "steps": trainer.state.global_step,
        "versions": {"rosu_llm": __version__, "python": platform.python_version(), **installed_versions(*_LIBRARIES)},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
    }
    text = json.dumps(record, indent=1, ensure_ascii=False, default=str)
    write_atomically(Path(trainer.args.output_dir) / RECORD_FILE, text + "\n")


def settings_to_keep(arguments: RunArguments, config: ROSUConfig) -> dict[str, Any]:
    """The settings that a checkpoint stores, as JSON reads them back, and what the data files held."""
    window = config.train_batch_size * config.gradient_accumulation_steps * config.world_size
    training = {name: getattr(config, name) for name in deciding() if hasattr(config, name)}
    settings = {
        **{name: getattr(value, "value", value) for name, value in training.items()},
        **run_settings(arguments, config, config),
        "samples_per_step": window,
        "contents": _contents(arguments),
    }
    kept: dict[str, Any] = json.loads(json.dumps({k: v for k, v in settings.items() if k not in _FREE}, default=str))
    if arguments.lora_r is None:
        kept = {name: value for name, value in kept.items() if name == "lora_r" or not name.startswith("lora_")}
    return kept


def _contents(arguments: RunArguments) -> dict[str, Any]:
    """Setting → digests of the files it names; those on the hub have none."""
    found: dict[str, Any] = {}
    for name in _FILES:
        given = getattr(arguments, name) or []
        for source in [given] if isinstance(given, str) else given:
            try:
                path = local_file(source)
            except DataError:
                continue  # the error comes where the rows are read
            if path is not None:
                found.setdefault(name, []).append(digest(path))
    return found


def check_same_run(checkpoint: str, arguments: RunArguments, config: ROSUConfig) -> None:
    """Raise if the checkpoint was written by a run with other settings; those it does not store are not compared."""
    path = Path(checkpoint) / STATE_FILE
    before = read_json(path).get("settings", {}) if path.is_file() else {}
    now = settings_to_keep(arguments, config)
    then = {name: before[name] for name in now if name in before}
    then |= {name: now[name] for name in _SOURCES & then.keys() if same_source(then[name], now[name])}
    changed = changed_conditions(then, {name: now[name] for name in then})
    if arguments.allow_changed:
        logger.warning("Resuming %s with other settings: %s.", checkpoint, "; ".join(changed) or "none")
        changed = [each for each in changed if each.split(" ")[0] in _IN_OPTIMIZER]
        if changed:
            raise ConfigError(
                f"{'; '.join(changed)}: the optimizer's state in {checkpoint!r} would override it, also with "
                "--allow-changed. Leave it as it was, or start a new run."
            )
    if changed:
        raise ConfigError(
            f"{checkpoint!r} is of a run with other settings ({'; '.join(changed)}): resume with the settings it was "
            "started with, start a new run in another --output-dir, or pass --allow-changed true."
        )


def same_source(before: Any, now: Any) -> bool:
    """Whether two values of a setting name the same file, folder or hub id; lists are compared item by item.

    A file or folder may have another path, or only the same name if the old one no longer exists. Hub ids are not
    paths: two of them with the same last part are two models.
    """
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(same_source, before, now))
    if before == now or not (isinstance(before, str) and isinstance(now, str)):
        return bool(before == now)
    old, new = Path(before).expanduser(), Path(now).expanduser()
    if old.resolve() == new.resolve():
        return True
    gone = not _exists(old) and (old.is_absolute() or before.startswith("."))
    return gone and _exists(new) and old.name == new.name


def _exists(path: Path) -> bool:
    """Whether a source is there; it may end in ``:name`` or ``:name:split``."""
    text, _ = named_rows(str(path))
    return any(Path(place).exists() for place in (text, text.rpartition(":")[0], text.partition(":")[0]) if place)
