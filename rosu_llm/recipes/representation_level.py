"""Runs with losses of hidden activations: corpora of plain text, a few matrices of a checkpoint."""

from __future__ import annotations

import torch

from ..data.corpus import AlternatingCorpora
from ..data.pairing import ForgetRetainCollator
from ..errors import ConfigError
from ..representation.trainer import RepresentationTrainer
from .corpora import read_corpora
from .prepare import Loaded, load_tokenizer
from .settings import Recipe


def load(recipe: Recipe) -> Loaded:
    """The model's name, its tokenizer, and the corpora."""
    arguments = recipe.arguments
    if arguments.lora_r is not None:
        raise ConfigError("lora_r has no place at representation level, which trains a few matrices: leave it out.")
    if arguments.holdout_data:
        raise ConfigError("holdout_data is for calibration, which this level has not: leave it out.")
    if arguments.chat_format:
        raise ConfigError("chat_format is for questions and answers; this level reads plain text: leave it out.")
    if arguments.retain_per_forget != 1:
        raise ConfigError(
            f"retain_per_forget={arguments.retain_per_forget} has no place at representation level, where a batch "
            "holds as many documents to keep as to forget: leave it out."
        )
    tokenizer = load_tokenizer(arguments)
    forget, retain = read_corpora(arguments, tokenizer)
    return Loaded(arguments.model_name_or_path, tokenizer, forget, retain)


def build_trainer(recipe: Recipe, loaded: Loaded) -> RepresentationTrainer:
    """The trainer before its first step."""
    arguments, config = recipe
    window = config.train_batch_size * config.gradient_accumulation_steps * config.world_size
    return RepresentationTrainer(
        loaded.model,
        config,
        train_dataset=AlternatingCorpora(loaded.forget, loaded.retain, window=window, seed=config.seed),
        data_collator=ForgetRetainCollator(loaded.tokenizer.pad_token_id),
        processing_class=loaded.tokenizer,
        dtype=getattr(torch, arguments.dtype),
        attn_implementation=arguments.attn_implementation,
        trust_remote_code=arguments.trust_remote_code,
    )
