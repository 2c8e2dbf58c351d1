"""Going on with a run: only with the settings it was started with.

A checkpoint holds weights, optimizer and schedule, not what is computed with them. Resumed under another method or
other data a run would end as neither of the two; a new learning rate would be ignored, since the optimizer brings its
own; another model or adapter fails deep inside a library. So every checkpoint carries the settings of its run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..training.checkpoints import STATE_FILE
from ..training.config import ROSUConfig
from .record import run_settings
from .settings import RunArguments

#: May change: how long the run is, where it writes, how a step is divided, and how it is computed.
_FREE = {
    "max_steps",
    "num_train_epochs",
    "output_dir",
    "overwrite",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "attn_implementation",
    "trust_remote_code",
}
_PLACES = {"model_name_or_path", "forget_data", "retain_data", "holdout_data", "chat_format"}


def settings_to_keep(arguments: RunArguments, config: ROSUConfig) -> dict[str, Any]:
    """What a checkpoint says about its run, as JSON reads it back."""
    window = config.train_batch_size * config.gradient_accumulation_steps * config.world_size
    settings = {**run_settings(arguments, config, config), "samples_per_step": window}
    kept: dict[str, Any] = json.loads(json.dumps({k: v for k, v in settings.items() if k not in _FREE}, default=str))
    if arguments.lora_r is None:
        kept = {name: value for name, value in kept.items() if name == "lora_r" or not name.startswith("lora_")}
    return kept


def check_same_run(checkpoint: str, arguments: RunArguments, config: ROSUConfig) -> None:
    """Raise where the checkpoint was written by a run with other settings; those it does not say are not compared."""
    path = Path(checkpoint) / STATE_FILE
    before = json.loads(path.read_text(encoding="utf-8")).get("settings", {}) if path.is_file() else {}
    now = settings_to_keep(arguments, config)
    changed = [name for name in now if name in before and not _same(name, before[name], now[name])]
    if changed:
        raise ConfigError(
            f"{checkpoint!r} is of a run with {_listed(before, changed)}, not {_listed(now, changed)}: resume with the "
            "settings it was started with, or start a new run in another --output-dir."
        )


def _listed(settings: Mapping[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name}={settings[name]!r}" for name in names)


def _same(name: str, before: Any, now: Any) -> bool:
    if name in _PLACES and isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return all(_same(name, a, b) for a, b in zip(before, now, strict=True))
    if name in _PLACES and isinstance(before, str) and isinstance(now, str):
        return before == now or _same_place(before, now)
    return bool(before == now)


def _same_place(before: str, now: str) -> bool:
    """The same file or folder under another path, or one of the same name where the old one is not there any more.

    Hub ids are no places: two of them that end alike are two models.
    """
    old, new = Path(before).expanduser(), Path(now).expanduser()
    if old.resolve() == new.resolve():
        return True
    gone = not _exists(old) and (old.is_absolute() or before.startswith("."))
    return gone and _exists(new) and old.name == new.name


def _exists(path: Path) -> bool:
    """Whether a source is there; it may end in ``:name`` or ``:name:split``."""
    text = str(path)
    return any(Path(place).exists() for place in (text, text.rpartition(":")[0], text.partition(":")[0]) if place)
