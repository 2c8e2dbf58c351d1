"""Diagnose a recipe: load as ``rosu train`` does, and measure where training would begin.

The trainer prepares model, losses, precision and layout (one device, DDP, FSDP2, ZeRO); when its training loop begins,
the measurement runs instead and no step is ever taken. So the model is measured as it would be trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset

from ...recipes.prepare import Loaded, assemble, load
from ...recipes.run import instead_of_training
from ...recipes.settings import WITHOUT_OUTPUT, Recipe, build, without_unseen
from ...training.layout import compute_dtype
from ...training.trainer import ROSUMixin
from ...training.window import PARTS
from .diagnosis import Diagnosis
from .measure import measure_windows
from .pairs import CouplingPlan, PairWindows

#: Settings of a run that do not apply to a diagnosis: it takes no step, writes no checkpoint and fades no pull.
REPLACED: dict[str, Any] = {**WITHOUT_OUTPUT, "max_steps": 1}


def diagnosis_recipe(values: Mapping[str, Any], out: Path | None = None) -> Recipe:
    """The run that settings of ``rosu train`` describe; ``out`` replaces its output_dir."""
    recipe = build({**without_unseen(values), **REPLACED})
    recipe.config.output_dir = recipe.config.output_dir if out is None else str(out)
    return recipe


def diagnose(recipe: Recipe, asked: Mapping[str, Any], loaded: Loaded | None = None) -> Diagnosis:
    """Measure what the recipe describes.

    Args:
        asked: fields of :class:`~rosu_llm.analysis.coupling.pairs.CouplingPlan`; those that are None follow the recipe
            (its batch sizes, its ρ, its seed).
        loaded: model and data, where they do not come from the recipe.
    """
    arguments, config = recipe
    if loaded is None:
        arguments.check_run()
    window = config.train_batch_size * config.gradient_accumulation_steps * config.world_size
    follows = {
        "forget_batch_size": window,
        "retain_batch_size": window * arguments.retain_per_forget,
        "micro_batch_size": config.train_batch_size,
        "rho": None if isinstance(config.rho, str) else config.rho,
        "seed": config.seed,
    }
    plan = CouplingPlan(**{**follows, **{key: value for key, value in asked.items() if value is not None}})
    if loaded is None:  # checkpoints in output_dir do not matter, as none is written
        loaded = load(Recipe(replace(arguments, overwrite=True), config))
    forget: Any = ConcatDataset(loaded.forget) if recipe.representation_level else loaded.forget
    trainer = assemble(recipe, loaded).trainer
    return measure_trainer(trainer, forget, loaded.retain, plan, name=arguments.model_name_or_path)


def measure_trainer(
    trainer: ROSUMixin, forget: Any, retain: Any, plan: CouplingPlan, *, name: str | None = None, progress: bool = True
) -> Diagnosis:
    """Coupling under a trainer's own losses, precision and layout, at the weights it would start from."""

    def measure() -> Diagnosis:
        model, state = trainer.model_wrapped, trainer.accelerator
        windows = PairWindows(
            model,
            {"forget": forget, "retain": retain},
            {part: trainer.window_loss(part) for part in PARTS},
            plan,
            trainer.data_collator,
            trainer.to_device,
            rank=state.process_index,
            world=state.num_processes,
        )
        return measure_windows(
            windows,
            trainer.parameter_space(),
            trainer.method_args,
            name=name,
            layout=trainer.layout,
            compute_dtype=compute_dtype(state),
            before=lambda: trainer.compute_references(model),
            after_pair=trainer.end_window,
            progress=progress,
        )

    return instead_of_training(trainer, measure)
