"""Run the orthogonality audit on what a recipe of ``rosu train`` describes, at the model as loaded.

The trainer of that recipe prepares model and losses, so that layout, precision, adapter and normalisation are those of
training; before its first step the audit takes over and the run ends. No weight is changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...errors import ConfigError
from ...evaluation.model_identity import find_model, identity
from ...experiments.settings import FORCED
from ...recipes.instead_of_training import instead_of_training
from ...recipes.prepare import prepare
from ...recipes.settings import RunArguments, build
from ...training.preflight import preflight
from ...training.trainer import ROSUMixin
from .audit import SCHEMA, Plan, cells, make_plan, measure_pairs, missing
from .gradients import Progress, usable
from .source import TrainerGradients, digest, units_of
from .store import PairStore, stored_conditions

#: Settings on which gradients at the loaded model depend, beside the model and the samples.
_SETTINGS = (
    *("forget_loss", "retain_loss", "npo_beta", "simnpo_beta", "simnpo_delta", "dtype", "bf16", "fp16"),
    *("lora_r", "lora_alpha", "lora_target_modules", "attn_implementation", "max_length"),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What an audit asks for beside the recipe.

    Attributes:
        batch_sizes: samples in a retain mini-batch; empty for 4, 8, 16, … as far as the retain set allows.
        forget_batch_size: samples in a forget mini-batch; None for the recipe's window.
        per_sample: ``auto``, ``yes`` or ``no``: compute all per-sample gradients once and keep them.
    """

    pairs: int = 500
    batch_sizes: Sequence[int] = ()
    forget_batch_size: int | None = None
    per_sample: str = "auto"


def audit(values: Mapping[str, Any], options: Options, out: Path, progress: Progress) -> dict[str, Any] | None:
    """Measure into ``out``, or go on there; the result, on the first process only."""
    own = {"calibrate": "off", "holdout_data": None, "output_dir": str(out)}
    recipe = build({**values, **FORCED, **own})
    arguments, config = recipe
    if recipe.representation_level:
        raise ConfigError(
            "The orthogonality audit is for next-token losses: at the model as loaded a representation-level retain "
            "loss is zero, and so is its gradient. Set forget_loss and retain_loss to nll."
        )
    if config.loss("retain").reference == "logits":
        raise ConfigError(
            f"retain_loss={config.retain_loss!r} compares with the model as loaded, where its gradient vanishes: audit "
            "with --retain-loss nll."
        )
    if config.reduction != "window_tokens":
        raise ConfigError(
            f"reduction={config.reduction!r} makes a batch's gradient depend on how it is split into micro-batches: "
            "audit with --reduction window_tokens."
        )
    window = config.train_batch_size * config.gradient_accumulation_steps * config.world_size
    config.gradient_accumulation_steps = 1
    prepared = prepare(recipe)
    trainer, loaded = prepared.trainer, prepared.loaded
    samples = {
        name: usable(name, data, units_of(trainer, name, data))
        for name, data in (("forget", loaded.forget), ("retain", loaded.retain))
    }
    counts = {name: len(data) for name, data in samples.items()}
    batch = options.forget_batch_size
    plan = make_plan(
        Plan(
            **counts,
            forget_batch=min(window, counts["forget"]) if batch is None else batch,
            sizes=tuple(options.batch_sizes),
            pairs=options.pairs,
            seed=config.seed,
        )
    )
    result = instead_of_training(trainer, lambda: _measure(trainer, arguments, samples, plan, options, out, progress))
    return result if trainer.is_world_process_zero() else None


def _measure(
    trainer: ROSUMixin,
    arguments: RunArguments,
    samples: Mapping[str, Sequence[Any]],
    plan: Plan,
    options: Options,
    out: Path,
    progress: Progress,
) -> dict[str, Any]:
    first = trainer.is_world_process_zero()
    gradients = TrainerGradients(trainer, samples, progress if first else lambda *_: None)
    path, matrix = out / "audit_orthogonality.jsonl", out / "audit_orthogonality.safetensors"
    begun = stored_conditions(path)
    settings = {**vars(trainer.args), **vars(arguments)}
    conditions: dict[str, Any] = {
        "model": identity(find_model(str(arguments.model_name_or_path))),
        **{name: digest(data) for name, data in samples.items()},
        "settings": {name: settings[name] for name in _SETTINGS},
        "seed": plan.seed,
        "forget_batch_size": plan.forget_batch,
        "route": gradients.route(options.per_sample, None if begun is None else str(begun.get("route"))),
        "version": __version__,
    }
    trainer.accelerator.wait_for_everyone()  # all processes have read the file before the first one writes it
    store = PairStore(path, conditions, writes=first)
    trainer.accelerator.wait_for_everyone()
    if store.full_norm is None or missing(plan, store):
        source = gradients.source(conditions["route"], matrix, json.dumps(conditions, sort_keys=True))
        store.put_full_norm(source.full_norm)
        measure_pairs(plan, source, store, progress if first else lambda *_: None)
        matrix.unlink(missing_ok=True)
    assert store.full_norm is not None
    count = preflight(trainer.model, trainer.method_args.rule(), trainer.raw_optimizer()).trainable
    return {
        "schema": SCHEMA,
        "model": arguments.model_name_or_path,
        "config": {
            **{name: getattr(arguments, name) for name in ("forget_data", "retain_data")},
            **conditions["settings"],
        },
        "seed": plan.seed,
        "pairs": plan.pairs,
        "forget_batch_size": plan.forget_batch,
        "route": conditions["route"],
        "forget_samples": plan.forget,
        "retain_samples": plan.retain,
        "parameters": count,
        "full_gradient_norm": store.full_norm,
        "cells": cells(plan, store.pairs, store.full_norm),
        "notes": [],
        "versions": {"rosu_llm": __version__, "torch": torch.__version__},
    }
