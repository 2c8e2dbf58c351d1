"""The full-retain orthogonality audit: ε_orth and its bound over many mini-batch pairs per retain batch size.

Does a direction that is neutral for a retain mini-batch stay neutral for the whole retain set? The error is bounded by
the error of the mini-batch retain gradient and falls with its batch size (paper, fig:orth_violin).

The trainer of a recipe prepares model and losses, so that layout, precision, adapter and normalisation are those of
training; where its first step would begin the audit runs instead. No weight is changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch

from ... import __version__
from ...errors import ConfigError
from ...evaluation.model_identity import find_model, identity
from ...recipes.prepare import prepare
from ...recipes.run import instead_of_training
from ...recipes.settings import WITHOUT_OUTPUT, Recipe, build, without_unseen
from ...training.preflight import preflight
from ...training.trainer import ROSUMixin
from ...training.window import PARTS
from .gradients import Progress, choose_route, pair_source
from .pairs import PairStore, cells, pair_error, stored_conditions
from .samples import AuditedSet, OrthogonalityPlan, audited_set

SCHEMA = "rosu/audit-orthogonality/1"

#: Settings on which gradients at the loaded model depend, beside the model and the samples.
_SETTINGS = (
    *("forget_loss", "retain_loss", "npo_beta", "simnpo_beta", "simnpo_delta", "dtype", "bf16", "fp16"),
    *("lora_r", "lora_alpha", "lora_target_modules", "attn_implementation", "max_length"),
)


class OrthogonalityDocument(TypedDict):
    """``audit_orthogonality.json``.

    Attributes:
        config: the settings of the recipe on which gradients depend.
        cells: the distributions of ε_orth and its bound, for each retain batch size.
    """

    schema: str
    model: str | None
    config: dict[str, Any]
    seed: int
    pairs: int
    forget_batch_size: int
    route: str
    forget_samples: int
    retain_samples: int
    parameters: int
    full_gradient_norm: float
    cells: list[dict[str, Any]]
    notes: list[str]
    versions: dict[str, str]


@dataclass(frozen=True)
class AuditSubject:
    """What is audited.

    Attributes:
        name: of the model, for people.
        identity: which weights these are.
        data: ``forget_data`` and ``retain_data``, for people; the samples themselves have a digest.
        settings: those on which gradients depend.
    """

    name: str | None
    identity: Any
    data: Mapping[str, Any]
    settings: Mapping[str, Any]


def audit_orthogonality(
    values: Mapping[str, Any],
    out: Path,
    progress: Progress,
    *,
    pairs: int = 500,
    batch_sizes: Sequence[int] = (),
    forget_batch_size: int | None = None,
    per_sample: str = "auto",
) -> OrthogonalityDocument | None:
    """Measure into ``out``, or resume there; the result is returned on the first process only.

    Args:
        values: settings of ``rosu train``.
        pairs: for every retain batch size.
        batch_sizes: samples in a retain mini-batch; empty for 4, 8, 16, … as far as the retain set allows.
        forget_batch_size: samples in a forget mini-batch; None for the recipe's window.
        per_sample: ``auto``, ``yes`` or ``no``: compute all per-sample gradients once and keep them.
    """
    recipe = build({**without_unseen(values), **WITHOUT_OUTPUT, "holdout_data": None, "output_dir": str(out)})
    _check(recipe)
    config = recipe.config
    window = config.train_batch_size * config.gradient_accumulation_steps * config.world_size
    config.gradient_accumulation_steps = 1
    prepared = prepare(recipe)
    trainer, loaded = prepared.trainer, prepared.loaded
    sets = {name: audited_set(trainer, name, getattr(loaded, name)) for name in PARTS}
    counts = {name: len(samples) for name, samples in sets.items()}
    plan = OrthogonalityPlan(
        **counts,
        forget_batch=min(window, counts["forget"]) if forget_batch_size is None else forget_batch_size,
        sizes=tuple(batch_sizes),
        pairs=pairs,
        seed=config.seed,
    ).checked()
    arguments = recipe.arguments
    settings = {**vars(trainer.args), **vars(arguments)}
    subject = AuditSubject(
        arguments.model_name_or_path,
        identity(find_model(str(arguments.model_name_or_path))),
        {"forget_data": arguments.forget_data, "retain_data": arguments.retain_data},
        {name: settings[name] for name in _SETTINGS},
    )
    return measure_orthogonality(trainer, sets, plan, subject, out, progress, per_sample=per_sample)


def measure_orthogonality(
    trainer: ROSUMixin,
    sets: Mapping[str, AuditedSet],
    plan: OrthogonalityPlan,
    subject: AuditSubject,
    out: Path,
    progress: Progress,
    *,
    per_sample: str = "auto",
) -> OrthogonalityDocument | None:
    """The same for a trainer at hand; ``sets`` are its ``forget`` and ``retain`` samples."""
    result = instead_of_training(trainer, lambda: _measure(trainer, sets, plan, subject, per_sample, out, progress))
    return result if trainer.is_world_process_zero() else None


def _check(recipe: Recipe) -> None:
    config = recipe.config
    if recipe.representation_level:
        raise ConfigError(
            "The orthogonality audit is for next-token losses: at the model as loaded a representation-level retain "
            "loss is zero, and so is its gradient. Set forget_loss and retain_loss to nll."
        )
    if config.loss("retain").reference in ("logits", "distributions"):
        raise ConfigError(
            f"retain_loss={config.retain_loss!r} compares with the model as loaded, where its gradient vanishes: audit "
            "with --retain-loss nll."
        )
    if config.reduction != "window_tokens":
        raise ConfigError(
            f"reduction={config.reduction!r} makes a batch's gradient depend on how it is split into micro-batches: "
            "audit with --reduction window_tokens."
        )


def _measure(
    trainer: ROSUMixin,
    sets: Mapping[str, AuditedSet],
    plan: OrthogonalityPlan,
    subject: AuditSubject,
    per_sample: str,
    out: Path,
    progress: Progress,
) -> OrthogonalityDocument:
    first = trainer.is_world_process_zero()
    shown = progress if first else lambda *_: None
    path, matrix = out / "audit_orthogonality.jsonl", out / "audit_orthogonality.safetensors"
    begun, space = stored_conditions(path), trainer.parameter_space()
    started = None if begun is None else str(begun.get("route"))
    route = choose_route(trainer, space, plan.forget + plan.retain, per_sample=per_sample, begun=started)
    conditions: dict[str, Any] = {
        "model": subject.identity,
        **{name: samples.digest for name, samples in sets.items()},
        "settings": dict(subject.settings),
        "seed": plan.seed,
        "forget_batch_size": plan.forget_batch,
        "route": route,
        "version": __version__,
    }
    trainer.accelerator.wait_for_everyone()  # all processes have read the file before the first one writes it
    store = PairStore(path, conditions, writes=first)
    trainer.accelerator.wait_for_everyone()
    if store.full_norm is None or any(key not in store.pairs for key in plan.keys):
        source = pair_source(trainer, space, sets, route, matrix, json.dumps(conditions, sort_keys=True), shown)
        store.put_full_norm(source.full_norm)
        for done, key in enumerate(plan.keys, start=1):
            if key not in store.pairs:
                store.put(key, pair_error(source.gram(*plan.draw(*key))))
            shown("mini-batch pairs", done, len(plan.keys))
        matrix.unlink(missing_ok=True)
    assert store.full_norm is not None
    return {
        "schema": SCHEMA,
        "model": subject.name,
        "config": {**subject.data, **subject.settings},
        "seed": plan.seed,
        "pairs": plan.pairs,
        "forget_batch_size": plan.forget_batch,
        "route": route,
        "forget_samples": plan.forget,
        "retain_samples": plan.retain,
        "parameters": preflight(trainer.model, trainer.method_args.rule(), trainer.raw_optimizer()).trainable,
        "full_gradient_norm": store.full_norm,
        "cells": cells(plan, store.pairs, store.full_norm),
        "notes": [],
        "versions": {"rosu_llm": __version__, "torch": torch.__version__},
    }
