"""Runs with losses of next-token probabilities: questions and answers, a whole model or an adapter on it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from ..compat import dtype_argument
from ..data.chat_format import FORMAT_FILE, ChatFormat, find_format, format_json, saved_format
from ..data.pairing import ForgetRetainCollator, ForgetRetainDataset, RetainDataset
from ..data.sources import load_samples
from ..errors import ConfigError, DataError
from ..files import write_atomically
from ..training.config import ROSUConfig
from ..training.trainer import ROSUTrainer
from .loading import Loaded, load_tokenizer, not_loaded
from .settings import Recipe, RunArguments

logger = logging.getLogger(__name__)


def load(recipe: Recipe) -> Loaded:
    """Model, tokenizer, and samples to forget, to keep and held out, as far as the recipe names them."""
    arguments, config = recipe
    if isinstance(arguments.forget_data, list) or not isinstance(arguments.max_length, int):
        raise ConfigError(
            "Lists for forget_data and max_length are taken in turn at representation level only (forget_loss: "
            "representation). Give one source and one length, or join the files."
        )
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
    return Loaded(model, tokenizer, forget, retain, holdout)


def build_trainer(recipe: Recipe, loaded: Loaded) -> ROSUTrainer:
    """The trainer before its first step; without samples to forget it learns those to keep."""
    arguments, config = recipe
    pairs: Any
    if loaded.forget is None:
        pairs = RetainDataset(loaded.retain)
    else:
        per_forget = arguments.retain_per_forget
        pairs = ForgetRetainDataset(loaded.forget, loaded.retain, retain_per_forget=per_forget, seed=config.seed)
    return ROSUTrainer(
        loaded.model,
        config,
        train_dataset=pairs,
        data_collator=ForgetRetainCollator(loaded.tokenizer.pad_token_id),
        processing_class=loaded.tokenizer,
        holdout_dataset=loaded.holdout,
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
        raise not_loaded(arguments, "model", error) from error


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
