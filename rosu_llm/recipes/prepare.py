"""From a recipe to a trainer that is ready to start: check before anything is loaded, written or deleted; load; build.

This is the only place that chooses between the two kinds of runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AutoTokenizer

from ..errors import ConfigError, one_line
from ..files import check_writable
from ..training.checkpoints import in_checkpoint, resolve_resume
from ..training.config import ROSUConfig
from ..training.supported import check_training_arguments
from ..training.trainer import ROSUMixin
from .folder import occupant
from .record import check_same_run
from .settings import Recipe, RunArguments, parts_needed


@dataclass(frozen=True)
class Loaded:
    """What a trainer is built from.

    Attributes:
        model: a model; at representation level its name or folder, of which the trainer loads the layers it needs.
        forget: samples; at representation level a list of corpora that are taken in turn.
        retain, holdout: samples, or one corpus.
        budget: samples that take no part in training; None sets some retain samples aside where they are needed.
        alternates: for each forget sample, samples with other answers to its question.
    """

    model: Any
    tokenizer: Any
    forget: Any
    retain: Any
    holdout: Any = None
    alternates: Any = None
    budget: Any = None


@dataclass(frozen=True)
class Prepared:
    """A run before its first step."""

    recipe: Recipe
    trainer: ROSUMixin
    loaded: Loaded


def prepare(recipe: Recipe) -> Prepared:
    """Check, load, and build the trainer."""
    return assemble(recipe, load(recipe))


def load(recipe: Recipe, parts: Sequence[str] | None = None) -> Loaded:
    """The first half of :func:`prepare`: check everything that can be checked, then load.

    ``parts`` are those of forget and retain data that must be there, if not those that the method needs.
    """
    arguments, config = recipe
    arguments.check_run(parts_needed(config) if parts is None else parts)
    check_config(config)
    check_model(arguments)
    loaded: Loaded = _level(recipe).load(recipe)
    return loaded


def assemble(recipe: Recipe, loaded: Loaded) -> Prepared:
    """The second half, for a model and data that are loaded already."""
    torch.manual_seed(recipe.config.seed)  # a new adapter is drawn when the trainer is built
    return Prepared(recipe, _level(recipe).build_trainer(recipe, loaded), loaded)


def _level(recipe: Recipe) -> ModuleType:
    from . import next_token, representation_level  # which need what is above

    return representation_level if recipe.representation_level else next_token


def load_tokenizer(arguments: RunArguments) -> Any:
    """The model's tokenizer, able to pad."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            arguments.model_name_or_path, trust_remote_code=arguments.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise not_loaded(arguments, "tokenizer", error) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                f"The tokenizer of {arguments.model_name_or_path!r} has neither a pad nor an end-of-text token: set "
                "pad_token in its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def not_loaded(arguments: RunArguments, what: str, error: Exception) -> ConfigError:
    """The error for a model or tokenizer that is neither a folder nor on the hub."""
    return ConfigError(
        f"model_name_or_path={arguments.model_name_or_path!r}: the {what} could not be loaded as a folder or from the "
        f"hub. {one_line(error)[:300]}"
    )


def check_config(config: ROSUConfig) -> None:
    """Raise for training arguments with which no step can be taken, or which need something that is missing."""
    from transformers.integrations import get_available_reporting_integrations

    check_training_arguments(config)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)} must be at least 1.")
    if config.max_steps <= 0 and config.num_train_epochs <= 0:
        raise ConfigError(
            f"num_train_epochs={config.num_train_epochs:g} takes no step: pass --num-train-epochs 5, or --max-steps N."
        )
    strategy = getattr(config.eval_strategy, "value", config.eval_strategy)
    if strategy != "no" or config.eval_on_start:
        asked = "eval_on_start=True" if strategy == "no" else f"eval_strategy={strategy!r}"
        raise ConfigError(
            f"{asked} needs evaluation data, which a run from settings does not have: leave it out, and measure the "
            "model or its checkpoints with 'rosu eval'."
        )
    known = get_available_reporting_integrations()
    for name in [config.report_to] if isinstance(config.report_to, str) else config.report_to or []:
        if name not in known:
            raise ConfigError(
                f"report_to={name!r} is not installed: pip install {name}, or pass --report-to none (the logs are in "
                "trainer_state.json anyway)."
            )


def check_model(arguments: RunArguments) -> None:
    """Raise if the model is an adapter's folder: the adapter would be loaded with frozen weights."""
    path = Path(arguments.model_name_or_path or "").expanduser() / "adapter_config.json"
    if path.is_file():
        base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
        raise ConfigError(
            f"model_name_or_path={arguments.model_name_or_path!r} is an adapter, not a model: merge it first (peft: "
            f"merge_and_unload, then save_pretrained), or train a new one on its base: --model-name-or-path {base} "
            "--lora-r 8."
        )


def check_output(arguments: RunArguments, config: ROSUConfig) -> None:
    """Raise for an output folder whose contents the run would destroy unasked."""
    out = Path(config.output_dir)
    found, checkpoint = occupant(out), resolve_resume(config.resume_from_checkpoint, config.output_dir)
    if found is None or (checkpoint is not None and in_checkpoint(Path(checkpoint).resolve(), out.resolve())):
        return
    if found == "foreign":
        raise ConfigError(
            f"output_dir={config.output_dir!r} holds a model that no run of rosu wrote: give another --output-dir."
        )
    if not arguments.overwrite:
        resume = "" if found == "run" else "--resume-from-checkpoint true to go on from the newest, "
        what = "a finished run" if found == "run" else "checkpoints"
        raise ConfigError(
            f"output_dir={config.output_dir!r} already holds {what}. Pass {resume}--overwrite true to start over, or "
            "another --output-dir."
        )


def check_start(arguments: RunArguments, config: ROSUConfig) -> None:
    """Raise if the run would overwrite its own model, cannot write, or would resume a run with other settings."""
    out = Path(config.output_dir)
    model = Path(arguments.model_name_or_path or "").expanduser().resolve()
    replaced = model == out.resolve() or (arguments.overwrite and in_checkpoint(model, out.resolve()))
    if arguments.model_name_or_path and model.is_dir() and replaced:
        raise ConfigError(
            f"output_dir={config.output_dir!r} is where the model itself lies ({arguments.model_name_or_path!r}), "
            "which would be overwritten: give another --output-dir."
        )
    if config.should_save:
        check_writable(out, f"output_dir={config.output_dir!r}")
    check_output(arguments, config)
    checkpoint = resolve_resume(config.resume_from_checkpoint, config.output_dir)
    if checkpoint is not None:
        check_same_run(checkpoint, arguments, config)
