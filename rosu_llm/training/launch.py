"""Run a recipe: load, unlearn, save."""

from __future__ import annotations

import logging
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ..data.chat_format import FORMAT_FILE, ChatFormat, find_format, format_json, saved_format
from ..data.pairing import ForgetRetainCollator, ForgetRetainDataset, RetainDataset
from ..data.sources import load_samples
from ..errors import ConfigError, DataError
from .checkpoint import last_complete, remove_all, write_atomically
from .config import ROSUConfig
from .precision import dtype_argument
from .recipe import RunArguments, one_line
from .run_record import write_record
from .trainer import ROSUTrainer

logger = logging.getLogger(__name__)


def run(arguments: RunArguments, config: ROSUConfig) -> ROSUTrainer:
    """Unlearn as described; returns the trainer after training and saving."""
    return train(*load(arguments, config), arguments, config)


def load(arguments: RunArguments, config: ROSUConfig) -> tuple[Any, Any, Any, Any, Any]:
    """The checked first half of :func:`run`: model, tokenizer, and samples to forget, to keep and held out."""
    arguments.check_run(parts_needed(config))
    if isinstance(arguments.forget_data, list) or not isinstance(arguments.max_length, int):
        raise ConfigError(
            "Lists for forget_data and max_length are taken in turn at representation level only (forget_loss: "
            "representation). Give one source and one length, or join the files."
        )
    check_output(arguments, config)
    check_reports(config)
    if config.calibrate == "holdout" and not arguments.holdout_data:
        raise DataError("calibrate: holdout needs never-trained samples: pass --holdout-data FILE (or a target loss).")
    tokenizer = load_tokenizer(arguments)
    form = chat_format(arguments, tokenizer)
    sources = (arguments.forget_data, arguments.retain_data, arguments.holdout_data)
    forget, retain, holdout = (_samples(source, tokenizer, form, arguments) if source else None for source in sources)
    model = _model(arguments)
    for part in (forget, retain, holdout):
        _check_context(part, model, arguments)
    return model, tokenizer, forget, retain, holdout


def train(
    model: Any, tokenizer: Any, forget: Any, retain: Any, holdout: Any, arguments: RunArguments, config: ROSUConfig
) -> ROSUTrainer:
    """The second half of :func:`run`, for a model and data that are loaded already."""
    if config.should_save:
        if arguments.overwrite and not config.resume_from_checkpoint:
            remove_all(Path(config.output_dir))
        remember_format(chat_format(arguments, tokenizer), Path(config.output_dir))
    trainer = build_trainer(model, tokenizer, forget, retain, holdout, arguments, config)
    start = perf_counter()
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    seconds = perf_counter() - start
    trainer.save_model()
    trainer.create_model_card()
    write_record(trainer, arguments, seconds)
    logger.info("The model is in %s", config.output_dir)
    return trainer


def build_trainer(
    model: Any, tokenizer: Any, forget: Any, retain: Any, holdout: Any, arguments: RunArguments, config: ROSUConfig
) -> ROSUTrainer:
    """The trainer of a run, before its first step; without ``forget`` it learns ``retain``."""
    pairs: Any
    if forget is None:
        pairs = RetainDataset(retain)
    else:
        pairs = ForgetRetainDataset(forget, retain, retain_per_forget=arguments.retain_per_forget, seed=config.seed)
    return ROSUTrainer(
        model,
        config,
        train_dataset=pairs,
        data_collator=ForgetRetainCollator(tokenizer.pad_token_id),
        processing_class=tokenizer,
        holdout_dataset=holdout,
        peft_config=_lora(arguments),
    )


def parts_needed(config: ROSUConfig) -> tuple[str, ...]:
    """The data a run must name: fine-tuning has nothing to forget."""
    return ("retain",) if config.rule().passes == ("retain",) else ("forget", "retain")


def chat_format(arguments: RunArguments, tokenizer: Any) -> ChatFormat | None:
    """How questions are encoded: as asked for, else as the model was trained before, else None."""
    if arguments.chat_format is not None:
        return find_format(arguments.chat_format, tokenizer, arguments.model_name_or_path)
    return saved_format(arguments.model_name_or_path) if arguments.model_name_or_path else None


def remember_format(form: ChatFormat | None, folder: Path) -> None:
    """Leave the format beside the model, so that whoever evaluates it asks in the same way."""
    if form is None:
        (folder / FORMAT_FILE).unlink(missing_ok=True)
    else:
        write_atomically(folder / FORMAT_FILE, format_json(form) + "\n")


def _samples(source: str, tokenizer: Any, form: ChatFormat | None, arguments: RunArguments) -> Any:
    assert isinstance(arguments.max_length, int)
    return load_samples(
        source,
        tokenizer,
        question_key=arguments.question_key,
        answer_key=arguments.answer_key,
        text_key=arguments.text_key,
        max_length=arguments.max_length,
        limit=arguments.limit,
        chat_format=form,
    )


def _check_context(samples: Any, model: Any, arguments: RunArguments) -> None:
    """Raise for samples that are longer than what the model can read at once."""
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = max((len(sample["input_ids"]) for sample in samples or ()), default=0)
    if isinstance(limit, int) and longest > limit:
        raise DataError(
            f"The longest sample has {longest} tokens, but {arguments.model_name_or_path!r} reads {limit} at once: "
            f"drop the long rows, or pass --max-length {limit}."
        )


def check_reports(config: ROSUConfig) -> None:
    """Raise for a logging tool that is not installed, before anything is loaded."""
    from transformers.integrations import get_available_reporting_integrations

    known = get_available_reporting_integrations()
    for name in [config.report_to] if isinstance(config.report_to, str) else config.report_to or []:
        if name not in known:
            raise ConfigError(
                f"report_to={name!r} is not installed: pip install {name}, or pass --report-to none (the logs are in "
                "trainer_state.json anyway)."
            )


def check_output(arguments: RunArguments, config: ROSUConfig) -> None:
    """Raise for an output folder with checkpoints of another run."""
    if config.resume_from_checkpoint or arguments.overwrite or last_complete(Path(config.output_dir)) is None:
        return
    raise ConfigError(
        f"output_dir={config.output_dir!r} already holds checkpoints. Pass --resume-from-checkpoint true to go on "
        "from the newest, --overwrite true to start over, or another --output-dir."
    )


def load_tokenizer(arguments: RunArguments) -> Any:
    """The model's tokenizer, able to pad."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            arguments.model_name_or_path, trust_remote_code=arguments.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise _not_loaded(arguments, "tokenizer", error) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                f"The tokenizer of {arguments.model_name_or_path!r} has neither a pad nor an end-of-text token: set "
                "pad_token in its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _model(arguments: RunArguments) -> Any:
    from transformers import AutoModelForCausalLM

    extra = {"attn_implementation": arguments.attn_implementation} if arguments.attn_implementation else {}
    try:
        return AutoModelForCausalLM.from_pretrained(
            arguments.model_name_or_path,
            **dtype_argument(getattr(torch, arguments.dtype)),
            trust_remote_code=arguments.trust_remote_code,
            **extra,
        )
    except (OSError, ValueError) as error:
        raise _not_loaded(arguments, "model", error) from error


def _not_loaded(arguments: RunArguments, what: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model_name_or_path={arguments.model_name_or_path!r}: the {what} could not be loaded as a folder or from the "
        f"hub. {one_line(error)[:300]}"
    )


def _lora(arguments: RunArguments) -> Any:
    if arguments.lora_r is None:
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError("lora_r was given but peft is not installed: pip install 'rosu-llm[peft]'.") from error
    targets = arguments.lora_target_modules
    return LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=targets.split(",") if isinstance(targets, str) and "," in targets else targets,
        task_type="CAUSAL_LM",
    )
