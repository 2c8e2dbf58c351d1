"""A training run as YAML plus flags: what to load, what to unlearn, where to put it.

The keys are those of :class:`RunArguments` and :class:`~rosu_llm.ROSUConfig`, in one flat mapping; the
flags are the same names with hyphens.
"""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import yaml

from ..data.sources import read_text
from ..errors import ConfigError, RosuError, one_line, unknown
from ..files import find_file, parse_yaml
from ..geometry.methods.registry import OPTIONS, find_rule
from ..losses import LOSSES
from ..representation.config import RepresentationConfig
from ..training.config import ROSUConfig
from ..training.method_checks import FOLLOWING, NAMES
from ..training.presets import PRESETS, WITHOUT_UNSEEN, with_named_loss
from ..training.values import coerce

#: Options of ``rosu train`` itself, written with hyphens and on the command line only.
COMMAND_OPTIONS = ("config", "accelerate_config", "num_processes", "smoke", "estimate", "requests", "list_settings")


#: What presets say of targets, besides where they come from.
_OF_TARGETS = ("forget_level", "forget_margin", "forget_draw", "forget_beyond")
#: Settings that a configuration of ``rosu vision`` is recognised by.
_OF_IMAGES = ("data", "width", "protocol", "pretrain_epochs", "forget_class", "batch_norm")


@dataclass
class RunArguments:
    """What a run loads."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Model: hub id or folder."})
    forget_data: str | list[str] | None = field(
        default=None,
        metadata={"help": "To forget: file, folder:name, or owner/name:config; a list names corpora of plain text."},
    )
    retain_data: str | None = field(
        default=None, metadata={"help": "To keep, written likewise; method finetune: to learn, without forget_data."}
    )
    holdout_data: str | None = field(default=None, metadata={"help": "Never trained, for calibrate and forget_until."})
    budget_data: str | None = field(
        default=None, metadata={"help": "For budget: takes no part in training; none sets 5 % of retain_data aside."}
    )
    memory_file: str | None = field(
        default=None,
        metadata={"help": "forget_only: gradients stored by 'rosu memory build', in place of retain_data."},
    )
    base_model: str | None = field(
        default=None, metadata={"help": "The model before it learned forget_data, for forget_until: base."}
    )
    alternates_key: str | None = field(
        default=None,
        metadata={"help": "forget_until: alternates: field of wrong answers; none takes answers of retain_data."},
    )
    refusals: str | None = field(
        default=None,
        metadata={"help": "idk_nll, idk_dpo: text file, one refusal per line; none takes the list of the package."},
    )
    alternates: str | None = field(
        default=None,
        metadata={"help": "altpo, forget_until: alternates: file of other answers, made by 'rosu data alternates'."},
    )
    question_key: str = field(default="question", metadata={"help": "Field of the question."})
    answer_key: str = field(default="answer", metadata={"help": "Field of the answer."})
    text_key: str = field(default="text", metadata={"help": "Field of plain text."})
    chat_format: str | None = field(
        default=None,
        metadata={
            "help": "Encode questions as OpenUnlearning does for this model: one of its model names, 'tokenizer', or a "
            "YAML file with template_args."
        },
    )
    max_length: int | list[int] = field(
        default=512, metadata={"help": "Longest sample in tokens; a list gives one for each forget corpus."}
    )
    min_length: int = field(
        default=0, metadata={"help": "Representation level: leave out documents of up to so many characters."}
    )
    limit: int | None = field(default=None, metadata={"help": "Use only the first rows of every source."})
    retain_per_forget: int = field(default=1, metadata={"help": "Retain samples per forget sample."})
    dtype: str = field(default="float32", metadata={"help": "Type to load the model in: float32 or bfloat16."})
    attn_implementation: str | None = field(default=None, metadata={"help": "eager, sdpa, flash_attention_2, …"})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})
    lora_r: int | None = field(default=None, metadata={"help": "Rank of a LoRA adapter; none trains everything."})
    lora_alpha: int = field(default=32, metadata={"help": "LoRA scale."})
    lora_dropout: float = field(default=0.0, metadata={"help": "LoRA dropout."})
    lora_target_modules: str | list[str] = field(default="all-linear", metadata={"help": "Layers that get an adapter."})
    overwrite: bool = field(default=False, metadata={"help": "Start over in an output_dir that holds a run of rosu."})
    preset: str | None = field(
        default=None,
        metadata={"help": "Settings to start from: " + ", ".join(PRESETS) + "; those given take precedence."},
    )
    allow_changed: bool = field(
        default=False, metadata={"help": "Resume although settings or data are not those the run was started with."}
    )

    def check_run(self, parts: Sequence[str] = ("forget", "retain")) -> None:
        """Raise for what is missing; ``parts`` are those the method computes gradients of."""
        given = [part for part in parts if not (part == "retain" and self.memory_file)]
        for name in ("model_name_or_path", *(f"{part}_data" for part in given)):
            if not getattr(self, name):
                flag = name.replace("_", "-")
                raise ConfigError(f"{name} is missing: put it in the configuration file or pass --{flag} VALUE.")
        if self.lora_r is not None and self.lora_r < 1:
            raise ConfigError(f"lora_r={self.lora_r} is no rank: give at least 1, or leave it out to train everything.")
        if self.lora_r is not None and self.lora_alpha < 1:
            raise ConfigError(f"lora_alpha={self.lora_alpha} scales the adapter away: give at least 1, e.g. 32.")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ConfigError(f"lora_dropout={self.lora_dropout} is no share of inputs to drop: give 0 to 0.9.")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit={self.limit} leaves no row: give at least 1, or leave it out to use every row.")
        if self.dtype not in ("float32", "bfloat16"):
            raise unknown("dtype", self.dtype, ("float32", "bfloat16"))


class Recipe(NamedTuple):
    """A run, described: what it loads, and how it trains."""

    arguments: RunArguments
    config: ROSUConfig

    @property
    def representation_level(self) -> bool:
        """Whether the losses are of hidden activations (Algorithm 3)."""
        return isinstance(self.config, RepresentationConfig)


def parts_needed(config: ROSUConfig) -> tuple[str, ...]:
    """The data a run must name: fine-tuning has nothing to forget."""
    return ("retain",) if config.rule().passes == ("retain",) else ("forget", "retain")


#: For runs whose result is measured in memory: nothing is saved, evaluated, resumed or reported on the way.
WITHOUT_OUTPUT: dict[str, Any] = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "resume_from_checkpoint": None,
    "push_to_hub": False,
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
}


def without_unseen(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that measures nothing besides its method's own data."""
    kept = {**values, **WITHOUT_UNSEEN}
    loss = with_named_loss(with_preset(kept)).get("forget_loss")
    if not (isinstance(loss, str) and loss in LOSSES and LOSSES[loss].alternative == "alternates"):
        kept["alternates"] = None  # they were for the level
    return kept


def read_config(path: str | Path) -> dict[str, Any]:
    """A YAML file as a flat mapping; those that ship with the package are found from any folder."""
    file = find_file(path)
    if file is None:
        raise ConfigError(
            f"--config {str(path)!r} is not a file. Recipes that come with the package are named from configs on: "
            "configs/recipes/tofu_llama-3.2-1b.yaml."
        )
    try:
        data = parse_yaml(read_text(file))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {one_line(error)}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold 'key: value' lines, not a {type(data).__name__}.")
    return {str(key).replace("-", "_"): value for key, value in data.items()}


def read_flags(flags: Sequence[str]) -> dict[str, Any]:
    """``--key value``, ``--key=value`` and bare ``--switch`` as a mapping."""
    values: dict[str, Any] = {}
    left = deque(flags)
    while left:
        flag = left.popleft()
        if not flag.startswith("--") or len(flag) == 2:
            raise ConfigError(f"{flag!r} is not understood: settings are written --key value, e.g. --rho 0.4.")
        key, equals, value = flag[2:].partition("=")
        if not equals:
            value = left.popleft() if left and not left[0].startswith("--") else "true"
        values[key.replace("-", "_")] = value
    return values


def config_class(values: Mapping[str, Any]) -> type[ROSUConfig]:
    """The configuration that the settings belong to: losses of hidden activations have one of their own."""
    names = [str(values[key]) for key in ("forget_loss", "retain_loss") if key in values]
    hidden = any(name in LOSSES and LOSSES[name].reference == "activations" for name in names)
    return RepresentationConfig if hidden else ROSUConfig


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the preset that the values name, and over them the values themselves.

    Of another method than the preset's, options that it does not have and the forget loss are left out; so is what does
    not go with another ``forget_until`` or with what else is set.
    """
    name = values.get("preset")
    if name in (None, "none"):
        return dict(values)
    if not isinstance(name, str) or name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    preset = PRESETS[name]
    rule = find_rule(str(with_named_loss(values).get("method", preset["method"])))
    own = OPTIONS if rule is None else rule.options()
    chosen = {key: value for key, value in preset.items() if key in own or key not in OPTIONS}
    if rule is not find_rule(preset["method"]):
        chosen.pop("forget_loss", None)
    until = values.get("forget_until", FOLLOWING[0])
    for key in [] if until in FOLLOWING else ["forget_refresh", *(_OF_TARGETS if until in ("off", False) else ())]:
        chosen.pop(key, None)
    for name, value, other in (("keep_best", "depth", "forget_refresh"), ("rho", "auto", "rho_schedule")):
        if values.get(name) == value:
            chosen.pop(other, None)
    loss = with_named_loss({**chosen, **values}).get("forget_loss")
    if until == "alternates" or (isinstance(loss, str) and loss in LOSSES and LOSSES[loss].alternative != "none"):
        chosen.pop("forget_level", None)  # answers are compared there, not tokens
    return {**chosen, **values}


def build(values: Mapping[str, Any]) -> Recipe:
    """The two groups of arguments, each value checked against its field."""
    chosen, typed = type_values(values)
    names = {f.name for f in dataclasses.fields(RunArguments)}
    run = RunArguments(**{k: v for k, v in typed.items() if k in names})
    try:
        config = chosen(**{k: v for k, v in typed.items() if k not in names})
    except RosuError as error:
        raise _with_origin(error, values) from error
    except Exception as error:  # from TrainingArguments' own checks, which raise whatever they meet
        raise ConfigError(one_line(error) or type(error).__name__) from error
    return Recipe(run, config)


def _with_origin(error: RosuError, values: Mapping[str, Any]) -> RosuError:
    """The error, and which of the settings it names were given by a preset alone."""
    name = values.get("preset", "none")
    preset = {} if name in (None, "none") else PRESETS[name]
    chosen = with_named_loss(with_preset(values))
    own = [key for key, value in preset.items() if key not in values and chosen.get(key) == value]
    named = [key for key in own if re.search(rf"\b{key}\b", str(error))]
    return type(error)(f"{error} Given by preset={name!r}: {', '.join(named)}.") if named else error


def type_values(values: Mapping[str, Any]) -> tuple[type[ROSUConfig], dict[str, Any]]:
    """The configuration class of the settings, and each value as the type of its field; what it says is not checked."""
    values = with_named_loss(with_preset(values))
    chosen = config_class(values)
    hints = {cls: get_type_hints(cls) for cls in (RunArguments, chosen)}
    fields = {f.name: hints[cls][f.name] for cls in hints for f in dataclasses.fields(cls) if f.init}
    for key in values:
        if key not in fields:
            raise _unknown_key(key, fields, chosen)
    typed = {key: coerce(key, value, fields[key]) for key, value in values.items()}
    for key in NAMES.keys() & typed.keys():
        _check_number(key, typed[key])
    return chosen, typed


def _check_number(key: str, value: Any) -> None:
    """Raise for text that is neither a number nor one of the setting's names."""
    if value in NAMES[key] or str(value).lower() in ("no", "false"):  # YAML reads a bare off as a boolean
        return
    try:
        float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{key}={value!r} cannot be read as float: give a number, or {', '.join(NAMES[key])}."
        ) from None


def _unknown_key(key: str, fields: Mapping[str, Any], chosen: type[ROSUConfig]) -> ConfigError:
    if key in COMMAND_OPTIONS:
        flag = key.replace("_", "-")
        return ConfigError(f"{key!r} is no setting of the run but an option of the command: write --{flag}.")
    if chosen is ROSUConfig and key in RepresentationConfig.__dataclass_fields__:
        return ConfigError(
            f"{key!r} is a setting of representation-level unlearning: set forget_loss and retain_loss to "
            "representation with it."
        )
    if key in _OF_IMAGES:
        return ConfigError(f"{key!r} is a setting of image classifiers, which have a verb of their own: rosu vision.")
    near = get_close_matches(key, fields, n=3, cutoff=0.6)
    hint = f" Did you mean {', '.join(near)}?" if near else " 'rosu train --list-settings' lists the method's."
    return ConfigError(f"Unknown setting {key!r}.{hint}")
