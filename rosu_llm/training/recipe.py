"""A training run as YAML plus flags: what to load, what to unlearn, where to put it.

The keys are those of :class:`RunArguments` and :class:`~rosu_llm.ROSUConfig`, in one flat mapping; the
flags are the same names with hyphens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, unknown
from .config import ROSUConfig


@dataclass
class RunArguments:
    """What a run loads."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Model: hub id or folder."})
    forget_data: str | None = field(default=None, metadata={"help": "To forget: file, or owner/name:config."})
    retain_data: str | None = field(default=None, metadata={"help": "To keep: file, or owner/name:config."})
    holdout_data: str | None = field(default=None, metadata={"help": "Never trained, for calibrate: holdout."})
    question_key: str = field(default="question", metadata={"help": "Field of the question."})
    answer_key: str = field(default="answer", metadata={"help": "Field of the answer."})
    text_key: str = field(default="text", metadata={"help": "Field of plain text."})
    max_length: int = field(default=512, metadata={"help": "Longest sample in tokens."})
    limit: int | None = field(default=None, metadata={"help": "Use only the first rows of every source."})
    retain_per_forget: int = field(default=1, metadata={"help": "Retain samples per forget sample."})
    dtype: str = field(default="float32", metadata={"help": "Type to load the model in: float32 or bfloat16."})
    attn_implementation: str | None = field(default=None, metadata={"help": "eager, sdpa, flash_attention_2, …"})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})
    lora_r: int | None = field(default=None, metadata={"help": "Rank of a LoRA adapter; none trains everything."})
    lora_alpha: int = field(default=32, metadata={"help": "LoRA scale."})
    lora_dropout: float = field(default=0.0, metadata={"help": "LoRA dropout."})
    lora_target_modules: str | list[str] = field(default="all-linear", metadata={"help": "Layers that get an adapter."})
    overwrite: bool = field(default=False, metadata={"help": "Start over in an output_dir that holds checkpoints."})

    def check_run(self) -> None:
        """Raise for what is missing."""
        for name in ("model_name_or_path", "forget_data", "retain_data"):
            if not getattr(self, name):
                flag = name.replace("_", "-")
                raise ConfigError(f"{name} is missing: put it in the configuration file or pass --{flag} VALUE.")
        if self.dtype not in ("float32", "bfloat16"):
            raise unknown("dtype", self.dtype, ("float32", "bfloat16"))


def read_config(path: str | Path) -> dict[str, Any]:
    """A YAML file as a flat mapping."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"--config {str(path)!r} is not a file.")
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold 'key: value' lines, not a {type(data).__name__}.")
    return {str(key).replace("-", "_"): value for key, value in data.items()}


def read_flags(flags: Sequence[str]) -> dict[str, Any]:
    """``--key value``, ``--key=value`` and bare ``--switch`` as a mapping."""
    values: dict[str, Any] = {}
    i = 0
    while i < len(flags):
        flag = flags[i]
        if not flag.startswith("--") or len(flag) == 2:
            raise ConfigError(f"{flag!r} is not understood: settings are written --key value, e.g. --rho 0.4.")
        key, equals, value = flag[2:].partition("=")
        i += 1
        if not equals:
            if i < len(flags) and not flags[i].startswith("--"):
                value = flags[i]
                i += 1
            else:
                value = "true"
        values[key.replace("-", "_")] = value
    return values


def build(values: Mapping[str, Any]) -> tuple[RunArguments, ROSUConfig]:
    """The two groups of arguments, each value checked against its field."""
    fields = {f.name: f for cls in (RunArguments, ROSUConfig) for f in dataclasses.fields(cls) if f.init}
    for key in values:
        if key not in fields:
            raise _unknown_key(key, fields)
    typed = {key: _coerce(key, value, str(fields[key].type)) for key, value in values.items()}
    names = {f.name for f in dataclasses.fields(RunArguments)}
    run = RunArguments(**{k: v for k, v in typed.items() if k in names})
    config = ROSUConfig(**{k: v for k, v in typed.items() if k not in names})
    return run, config


def _unknown_key(key: str, fields: Mapping[str, Any]) -> ConfigError:
    from difflib import get_close_matches

    near = get_close_matches(key, fields, n=3, cutoff=0.6)
    hint = f" Did you mean {', '.join(near)}?" if near else " 'rosu train --help' lists the keys."
    return ConfigError(f"Unknown setting {key!r}.{hint}")


def _coerce(key: str, value: Any, kind: str) -> Any:
    """Text from flags (and YAML 1.1's reading of 1e-5 as text) to the field's type."""
    if not isinstance(value, str):
        return value
    words = set(kind.replace("|", " ").replace("[", " ").replace("]", " ").replace(",", " ").split())
    lowered = value.strip().lower()
    if "bool" in words and lowered in ("true", "false", "yes", "no", "on", "off"):
        return lowered in ("true", "yes", "on")
    if lowered in ("none", "null") and ("None" in words or "Optional" in words):
        return None
    for name, convert in (("int", int), ("float", float)):
        if name in words:
            try:
                return convert(value)
            except ValueError:
                continue
    if lowered == "true" and key == "resume_from_checkpoint":
        return True
    if value[:1] in "[{" and ("list" in words or "dict" in words):
        return yaml.safe_load(value)
    if "str" in words or "Any" in words or not words & {"int", "float", "bool"}:
        return value
    raise ConfigError(f"{key}={value!r} cannot be read as {kind}.")
