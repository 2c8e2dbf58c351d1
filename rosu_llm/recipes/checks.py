"""What can be refused before anything is loaded, written or deleted."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..errors import ConfigError
from ..training.checkpoints import in_checkpoint, last_complete, resolve_resume
from ..training.config import ROSUConfig
from .resume import check_same_run
from .settings import RunArguments


def check_config(config: ROSUConfig) -> None:
    """Raise for training arguments with which no step can be taken, or that ask for what is not there."""
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
            f"{asked} needs evaluation data, which a run from settings has not: leave it out, and measure the model or "
            "its checkpoints with 'rosu eval'."
        )
    _check_reports(config)


def _check_reports(config: ROSUConfig) -> None:
    from transformers.integrations import get_available_reporting_integrations

    known = get_available_reporting_integrations()
    for name in [config.report_to] if isinstance(config.report_to, str) else config.report_to or []:
        if name not in known:
            raise ConfigError(
                f"report_to={name!r} is not installed: pip install {name}, or pass --report-to none (the logs are in "
                "trainer_state.json anyway)."
            )


def check_model(arguments: RunArguments) -> None:
    """Raise for the folder of an adapter, which would be loaded frozen."""
    path = Path(arguments.model_name_or_path or "").expanduser() / "adapter_config.json"
    if path.is_file():
        base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
        raise ConfigError(
            f"model_name_or_path={arguments.model_name_or_path!r} is an adapter, not a model: merge it first (peft: "
            f"merge_and_unload, then save_pretrained), or train a new one on its base: --model-name-or-path {base} "
            "--lora-r 8."
        )


def check_output(arguments: RunArguments, config: ROSUConfig) -> None:
    """Raise for an output folder with checkpoints of another run."""
    if config.resume_from_checkpoint or arguments.overwrite or last_complete(Path(config.output_dir)) is None:
        return
    raise ConfigError(
        f"output_dir={config.output_dir!r} already holds checkpoints. Pass --resume-from-checkpoint true to go on "
        "from the newest, --overwrite true to start over, or another --output-dir."
    )


def check_start(arguments: RunArguments, config: ROSUConfig) -> None:
    """Raise where the run would destroy its own model, could not write, or goes on with a run that is not this one."""
    out = Path(config.output_dir)
    model = Path(arguments.model_name_or_path or "").expanduser().resolve()
    replaced = model == out.resolve() or (arguments.overwrite and in_checkpoint(model, out.resolve()))
    if arguments.model_name_or_path and model.is_dir() and replaced:
        raise ConfigError(
            f"output_dir={config.output_dir!r} is where the model itself lies ({arguments.model_name_or_path!r}), "
            "which would be overwritten: give another --output-dir."
        )
    place = next(place for place in (out, *out.parents) if place.exists())
    if config.should_save and not (place.is_dir() and os.access(place, os.W_OK)):
        reason = "cannot be written to" if place.is_dir() else "is a file"
        raise ConfigError(f"output_dir={config.output_dir!r}: {str(place)!r} {reason}. Give another --output-dir.")
    checkpoint = resolve_resume(config.resume_from_checkpoint, config.output_dir)
    if checkpoint is not None:
        check_same_run(checkpoint, arguments, config)


def make_output(config: ROSUConfig) -> None:
    """Make the output folder, on the processes that write."""
    if config.should_save:
        try:
            Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output_dir={config.output_dir!r} cannot be made ({error.strerror}): give another --output-dir."
            ) from error
