"""Runs with losses of hidden activations: corpora of plain text, a few matrices of a checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from ..data.corpus import AlternatingCorpora
from ..data.pairing import ForgetRetainCollator, ForgetRetainDataset
from ..errors import ConfigError
from ..representation.config import RepresentationConfig
from ..representation.trainer import RepresentationTrainer
from .corpora import read_corpora
from .next_token import chat_format, sample_reader
from .prepare import Loaded, load_tokenizer
from .settings import Recipe, RunArguments


def load(recipe: Recipe) -> Loaded:
    """The model's name, its tokenizer, and the corpora, or questions and answers (``answers_only``)."""
    arguments, config = recipe
    assert isinstance(config, RepresentationConfig)
    if arguments.lora_r is not None:
        raise ConfigError("lora_r has no place at representation level, which trains a few matrices: leave it out.")
    if arguments.holdout_data:
        raise ConfigError("holdout_data is for calibration, which this level has not: leave it out.")
    if config.answers_only:
        return _questions(arguments)
    if arguments.chat_format:
        raise ConfigError(
            "chat_format is for questions and answers, and this level reads plain text: set answers_only for the "
            "former (configs/recipes/tofu/rmu.yaml), or leave chat_format out."
        )
    if arguments.retain_per_forget != 1:
        raise ConfigError(
            f"retain_per_forget={arguments.retain_per_forget} has no place at representation level, where a batch "
            "holds as many documents to keep as to forget: leave it out."
        )
    tokenizer = load_tokenizer(arguments)
    forget, retain = read_corpora(arguments, tokenizer)
    return Loaded(arguments.model_name_or_path, tokenizer, forget, retain)


def _questions(arguments: RunArguments) -> Loaded:
    if isinstance(arguments.forget_data, list) or not isinstance(arguments.max_length, int):
        raise ConfigError(
            "A list for forget_data or max_length names corpora, and answers_only reads questions and answers: give "
            "one source and one length."
        )
    tokenizer = load_tokenizer(arguments)
    samples = sample_reader(arguments, tokenizer, chat_format(arguments, tokenizer))
    forget, retain = samples(str(arguments.forget_data)), samples(str(arguments.retain_data))
    return Loaded(arguments.model_name_or_path, tokenizer, forget, retain)


def build_trainer(recipe: Recipe, loaded: Loaded) -> RepresentationTrainer:
    """The trainer before its first step."""
    arguments, config = recipe
    assert isinstance(config, RepresentationConfig)
    window = config.train_batch_size * config.gradient_accumulation_steps * config.world_size
    pairs: Any
    if config.answers_only:
        each = arguments.retain_per_forget
        pairs = ForgetRetainDataset(loaded.forget, loaded.retain, retain_per_forget=each, seed=config.seed)
    else:
        pairs = AlternatingCorpora(loaded.forget, loaded.retain, window=window, seed=config.seed)
    return RepresentationTrainer(
        loaded.model,
        config,
        train_dataset=pairs,
        data_collator=ForgetRetainCollator(loaded.tokenizer.pad_token_id),
        processing_class=loaded.tokenizer,
        dtype=getattr(torch, arguments.dtype),
        attn_implementation=arguments.attn_implementation,
        trust_remote_code=arguments.trust_remote_code,
    )
