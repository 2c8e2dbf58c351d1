"""Runs whose losses are of next-token probabilities: questions and answers, a whole model or an adapter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.utils.data import ConcatDataset
from transformers import AutoTokenizer

from ..compat import dtype_argument, load_causal_model
from ..data.chat_format import FORMAT_FILE, ChatFormat, find_format, format_json, saved_format
from ..data.pairing import ForgetRetainCollator, ForgetRetainDataset
from ..data.sources import load_samples
from ..data.sweep import SweepDataset
from ..errors import ConfigError, DataError
from ..files import write_atomically
from ..training.adapter import refused_adapter
from ..training.trainer import ROSUMixin, ROSUTrainer
from .corpora import lengths_of, read_corpora
from .prepare import Loaded, load_tokenizer, not_loaded
from .settings import Recipe, RunArguments, parts_needed
from .third_answers import alternate_samples, check_third, with_third

logger = logging.getLogger(__name__)

#: Retain samples of which two can be set aside for a budget.
_LEAST_TO_DIVIDE = 4


def load(recipe: Recipe) -> Loaded:
    """Model, tokenizer, and those of the forget, retain and holdout samples that the recipe names."""
    arguments, config = recipe
    corpora = isinstance(arguments.forget_data, list) or not isinstance(arguments.max_length, int)
    if corpora:
        _check_corpora(recipe)
    if config.rule().sweeps and arguments.lora_r is not None:
        raise refused_adapter(config.method)
    for name in ("calibrate", "forget_until"):
        if getattr(config, name) == "holdout" and not arguments.holdout_data:
            raise DataError(f"{name}: holdout needs never-trained samples: pass --holdout-data FILE, or a target loss.")
    if config.forget_until == "base" and not arguments.base_model:
        raise ConfigError("forget_until: base needs the model before it learned the data: pass --base-model NAME.")
    check_third(recipe)
    tokenizer = load_tokenizer(arguments)
    form = chat_format(arguments, tokenizer)
    samples = sample_reader(arguments, tokenizer, form)
    retained = None if arguments.memory_file else arguments.retain_data
    asked = (None, None) if isinstance(arguments.forget_data, list) or corpora else (arguments.forget_data, retained)
    sources = (*asked, arguments.holdout_data, arguments.budget_data)
    forget, retain, holdout, budget = (samples(source) if source else None for source in sources)
    if corpora:
        several, retain = read_corpora(arguments, tokenizer)
        forget = ConcatDataset(several)
    if config.budget is not None:
        _check_budget(arguments, retain, budget)
    trained = [part for part in (forget, retain) if part is not None]
    for name, part in (("holdout_data", holdout), ("budget_data", budget)):
        _check_apart(name, part, trained)
    if config.forget_until == "base":
        _check_same_words(str(arguments.base_model), tokenizer)
    forget = with_third(forget, recipe, tokenizer, form)
    alternates = alternate_samples(arguments, tokenizer, form) if config.forget_until == "alternates" else None
    if forget is not None and "forget" not in parts_needed(config) and config.should_log:
        logger.warning(
            "method=%s learns retain_data alone; with forget_data an epoch is %d samples of it, as in a run that "
            "forgets, not all %d. Leave forget_data out to learn every row once per epoch.",
            config.method,
            len(forget) * arguments.retain_per_forget,
            len(retain or ()),
        )
    model = load_model(arguments)
    for part in (forget, retain, holdout, budget):
        _check_fits(part, model, tokenizer, form, arguments)
    return Loaded(model, tokenizer, forget, retain, holdout, alternates, budget)


def _check_budget(arguments: RunArguments, retain: Any, budget: Any) -> None:
    """Raise if there is too little to look at, or nothing that could be set aside."""
    if budget is not None and len(budget) < 2:
        raise DataError(f"budget_data={arguments.budget_data!r} has 1 row: give at least 2, better 50.")
    if budget is None and retain is None:
        why = "memory_file stands in for retain_data" if arguments.memory_file else "there is no retain_data"
        raise DataError(f"budget needs data to look at, and {why}: pass --budget-data FILE.")
    if budget is None and len(retain) < _LEAST_TO_DIVIDE:
        raise DataError(
            f"budget sets some of retain_data aside, and {len(retain)} rows are too few to divide: pass --budget-data "
            "FILE, or more retain data."
        )


def _check_apart(name: str, part: Any, trained: Sequence[Any]) -> None:
    """Raise if all samples of ``part``, which training must not see, are among those it learns from."""
    if part is None:
        return
    unseen = [tuple(sample["input_ids"]) for sample in part]
    wanted = set(unseen)  # the smaller of the two
    known = {ids for other in trained for sample in other if (ids := tuple(sample["input_ids"])) in wanted}
    shared = sum(ids in known for ids in unseen)
    if shared == len(part):
        raise DataError(f"{name}: all of its {shared} samples are in forget_data or retain_data too. Give others.")
    if shared:
        logger.warning("%d of the %d samples of %s are also in forget_data or retain_data.", shared, len(part), name)


def _check_same_words(base: str, tokenizer: Any) -> None:
    """Raise if the base model's tokenizer has other words behind the same numbers; one without is taken as it is.

    Where a model has none, transformers may make one of a few words.
    """
    try:
        words = AutoTokenizer.from_pretrained(base).get_vocab()
    except (OSError, ValueError):
        return
    ours = {number: word for word, number in tokenizer.get_vocab().items()}
    if 2 * len(words) < len(ours):
        return
    other = next((word for word, number in sorted(words.items()) if ours.get(number, word) != word), None)
    if other is not None:
        raise ConfigError(
            f"base_model={base!r} has another vocabulary: its token {words[other]} is {other!r}, and the model's is "
            f"{ours[words[other]]!r}. Give the model that this one was trained from."
        )


def _check_corpora(recipe: Recipe) -> None:
    """Raise for what does not go with a list of corpora, which are texts and are joined here."""
    arguments, config = recipe
    lengths_of(arguments)
    for name, off in (("chat_format", None), ("memory_file", None), ("forget_until", "off")):
        value = getattr(arguments if hasattr(arguments, name) else config, name)
        if value != off:
            raise ConfigError(
                f"{name}={value!r} is for questions and answers, and a list for forget_data names corpora of plain "
                "text: leave it out, or give one source."
            )
    if config.loss("forget").alternative != "none":
        raise ConfigError(
            f"forget_loss={config.forget_loss!r} gives questions another answer, and a list for forget_data (or "
            "max_length) is for corpora of plain text: give one source of questions and one max_length, or use another "
            "forget_loss."
        )


def sample_reader(arguments: RunArguments, tokenizer: Any, form: ChatFormat | None) -> Callable[[str], Any]:
    """From the name of a source to its samples, encoded as the settings say."""
    return partial(
        load_samples,
        tokenizer=tokenizer,
        question_key=arguments.question_key,
        answer_key=arguments.answer_key,
        text_key=arguments.text_key,
        max_length=arguments.max_length if isinstance(arguments.max_length, int) else max(arguments.max_length),
        limit=arguments.limit,
        chat_format=form,
    )


def build_trainer(recipe: Recipe, loaded: Loaded) -> ROSUTrainer:
    """The trainer before its first step; without forget samples it fine-tunes on the retain samples."""
    arguments, config = recipe
    forget, retain, per_forget = loaded.forget, loaded.retain, arguments.retain_per_forget
    budget = loaded.budget
    if config.budget is not None and budget is None:
        retain, budget = _set_aside(retain)
    pairs: Any = [{"retain": [sample]} for sample in retain or ()]
    if forget is not None:
        pairs = [{"forget": [sample]} for sample in forget]
        if retain is not None:
            mismatch = "mismatch" in config.rule().passes
            pairs = ForgetRetainDataset(
                forget, retain, retain_per_forget=per_forget, seed=config.seed, mismatch=mismatch
            )
        if retain is not None and config.rule().sweeps:
            pairs = SweepDataset(forget, retain, multiple=config.train_batch_size * config.world_size)
    return ROSUTrainer(
        loaded.model,
        config,
        train_dataset=pairs,
        data_collator=ForgetRetainCollator(loaded.tokenizer.pad_token_id),
        processing_class=loaded.tokenizer,
        holdout_dataset=loaded.holdout,
        alternates_dataset=loaded.alternates,
        budget_dataset=budget,
        memory_dataset=retain if config.rule().stored and not arguments.memory_file else None,
        memory_file=arguments.memory_file,
        base_model=arguments.base_model,
        peft_config=lora_config(arguments),
    )


def _set_aside(retain: Any) -> tuple[list[Any], list[Any]]:
    """What is trained on, and the evenly spaced twentieth that is not, at least two."""
    step = max(2, min(20, len(retain) // 2))
    kept = range(step - 1, len(retain), step)
    logger.info("budget: %d of %d retain samples take no part in training", len(kept), len(retain))
    return [retain[i] for i in range(len(retain)) if i not in kept], [retain[i] for i in kept]


def chat_format(arguments: RunArguments, tokenizer: Any) -> ChatFormat | None:
    """How questions are encoded: as the settings say, else as the model was trained before, else None."""
    if arguments.chat_format is not None:
        return find_format(arguments.chat_format, tokenizer, arguments.model_name_or_path)
    return saved_format(arguments.model_name_or_path) if arguments.model_name_or_path else None


def write_format(arguments: RunArguments, trainer: ROSUMixin) -> None:
    """Write the chat format beside the model, so that evaluations ask in the same way; remove a stale one."""
    if Recipe(arguments, trainer.args).representation_level and not trainer.args.answers_only:
        return
    path = Path(trainer.args.output_dir) / FORMAT_FILE
    form = chat_format(arguments, trainer.processing_class)
    if form is None:
        path.unlink(missing_ok=True)
    else:
        write_atomically(path, format_json(form) + "\n")


def _check_fits(samples: Any, model: Any, tokenizer: Any, form: ChatFormat | None, arguments: RunArguments) -> None:
    """Raise for samples that exceed the model's context, or have tokens it has no embedding for."""
    if not samples:
        return
    name, limit = arguments.model_name_or_path, getattr(model.config, "max_position_embeddings", None)
    samples = [*samples, *getattr(samples, "every_alternate", ())]
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


def load_model(arguments: RunArguments, name: str | None = None) -> Any:
    """The model of the settings, or another one loaded likewise."""
    extra = {"attn_implementation": arguments.attn_implementation} if arguments.attn_implementation else {}
    try:
        return load_causal_model(
            str(name or arguments.model_name_or_path),
            **dtype_argument(getattr(torch, arguments.dtype)),
            trust_remote_code=arguments.trust_remote_code,
            **extra,
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise not_loaded(arguments, "model", error) from error


def lora_config(arguments: RunArguments) -> Any:
    """PEFT's configuration of the adapter; None to train everything."""
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
        target_modules=[name.strip() for name in targets.split(",")]
        if isinstance(targets, str) and "," in targets
        else targets,
        task_type="CAUSAL_LM",
    )
