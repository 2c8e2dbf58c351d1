"""Run a recipe: load, unlearn, save."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import TrainerCallback

from ..data.chat_format import FORMAT_FILE, ChatFormat, find_format, format_json, saved_format
from ..data.pairing import ForgetRetainCollator, ForgetRetainDataset, RetainDataset
from ..data.sources import load_samples
from ..errors import ConfigError, DataError, one_line
from ..files import write_atomically
from ..training.checkpoints import remove_all
from ..training.config import ROSUConfig
from ..training.precision import dtype_argument
from ..training.trainer import ROSUMixin, ROSUTrainer
from .checks import check_config, check_model, check_output, check_start, make_output
from .record import write_record
from .resume import settings_to_keep
from .settings import RunArguments

logger = logging.getLogger(__name__)


def run(arguments: RunArguments, config: ROSUConfig) -> ROSUTrainer:
    """Unlearn as described; returns the trainer after training and saving."""
    check_start(arguments, config)
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
    check_config(config)
    check_model(arguments)
    if config.calibrate == "holdout" and not arguments.holdout_data:
        raise DataError("calibrate: holdout needs never-trained samples: pass --holdout-data FILE (or a target loss).")
    tokenizer = load_tokenizer(arguments)
    form = chat_format(arguments, tokenizer)
    sources = (arguments.forget_data, arguments.retain_data, arguments.holdout_data)
    forget, retain, holdout = (_samples(source, tokenizer, form, arguments) if source else None for source in sources)
    if forget is not None and "forget" not in parts_needed(config) and config.should_log:
        logger.warning(
            "method=%s learns retain_data alone; with forget_data an epoch is %d samples of it, as in a run that "
            "forgets, not all %d. Leave forget_data out to learn every row once per epoch.",
            config.method,
            len(forget) * arguments.retain_per_forget,
            len(retain or ()),
        )
    model = _model(arguments)
    for part in (forget, retain, holdout):
        _check_fits(part, model, tokenizer, form, arguments)
    return model, tokenizer, forget, retain, holdout


def train(
    model: Any, tokenizer: Any, forget: Any, retain: Any, holdout: Any, arguments: RunArguments, config: ROSUConfig
) -> ROSUTrainer:
    """The second half of :func:`run`, for a model and data that are loaded already."""
    form = chat_format(arguments, tokenizer)
    make_output(config)
    trainer = build_trainer(model, tokenizer, forget, retain, holdout, arguments, config)
    train_and_save(trainer, arguments, config, lambda: remember_format(form, Path(config.output_dir)))
    return trainer


def train_and_save(
    trainer: ROSUMixin, arguments: RunArguments, config: ROSUConfig, at_start: Callable[[], None] = lambda: None
) -> None:
    """Train and write the model, its card and its record.

    What lies in the output folder is touched, and ``at_start`` called, only after the first step, before anything is
    saved: whatever is wrong with the run has come out by then.
    """

    def take_over() -> None:
        if arguments.overwrite and not config.resume_from_checkpoint:
            remove_all(Path(config.output_dir))
        at_start()

    trainer.run_settings = settings_to_keep(arguments, config)
    first = _AfterTheFirstStep(take_over)
    trainer.add_callback(first)
    start = perf_counter()
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    seconds = perf_counter() - start
    first(config)  # a resumed run may have had no step left
    trainer.save_model()
    trainer.create_model_card()
    write_record(trainer, arguments, seconds)
    logger.info("The model is in %s", config.output_dir)


class _AfterTheFirstStep(TrainerCallback):
    """Does something once, on the process that writes; the method's parts are built and checked in the first step."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act, self._done = act, False

    def __call__(self, args: Any) -> None:
        if args.should_save and not self._done:
            self._done = True
            self._act()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self(args)


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


def _check_fits(samples: Any, model: Any, tokenizer: Any, form: ChatFormat | None, arguments: RunArguments) -> None:
    """Raise for samples that are longer than what the model can read at once, or have tokens it does not know."""
    if not samples:
        return
    name, limit = arguments.model_name_or_path, getattr(model.config, "max_position_embeddings", None)
    longest = max(len(sample["input_ids"]) for sample in samples)
    if isinstance(limit, int) and longest > limit:
        cut = f"pass --max-length {limit}, which cuts answers" if form is None else "take a model that reads more"
        raise DataError(
            f"The longest sample has {longest} tokens, but {name!r} reads {limit} at once: drop the long rows, "
            f"or {cut}."
        )
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    highest = max(tokenizer.pad_token_id, *(max(sample["input_ids"], default=0) for sample in samples))
    if isinstance(rows, int) and highest >= rows:
        raise ConfigError(
            f"The tokenizer gives token {highest} ({tokenizer.convert_ids_to_tokens(highest)!r}), but {name!r} has "
            f"embeddings for {rows} only: put the model's own tokenizer beside it, or enlarge its embeddings "
            "(model.resize_token_embeddings)."
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
