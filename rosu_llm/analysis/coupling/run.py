"""Diagnose a recipe: load as ``rosu train`` does, let its trainer spread the model, measure instead of training.

The trainer prepares model, losses, precision and layout (one device, DDP, FSDP2, ZeRO); when its training loop begins,
the measurement takes its place and no step is ever taken. So what is measured is what would be trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.utils.data import ConcatDataset

from ...recipes.instead_of_training import instead_of_training
from ...recipes.loading import Loaded
from ...recipes.prepare import Prepared, assemble, prepare
from ...recipes.settings import WITHOUT_OUTPUT, Recipe, RunArguments, build
from ...toys.train import REPLACED as TOY_SETTINGS
from ...training.config import ROSUConfig
from ...training.layout import compute_dtype
from ...training.window import PARTS
from .diagnosis import Diagnosis
from .measure import measure_windows
from .windows import Plan, Windows

#: Settings of a run that a diagnosis has no use for: it takes no step, writes no checkpoint and fades no pull.
REPLACED: dict[str, Any] = {**WITHOUT_OUTPUT, "max_steps": 1, "calibrate": "off"}

#: Sizes of a smoke run.
SMOKE = {"pairs": 2, "forget_batch_size": 2, "retain_batch_size": 2, "points": 0}


def diagnose(
    values: Mapping[str, Any], asked: Mapping[str, Any], *, out: Path | None = None, smoke: bool = False
) -> tuple[Diagnosis, Path, bool]:
    """The diagnosis of the run that ``values`` describe, its folder, and whether this process is to write it.

    Args:
        values: settings of ``rosu train``.
        asked: what to measure, fields of :class:`~rosu_llm.analysis.coupling.windows.Plan`; those that are None
            follow the run (its batch sizes, its ρ, its seed).
        out: folder of the result; the run's output_dir unless given.
        smoke: measure a toy in place of the model and the data.
    """
    given = {key: value for key, value in asked.items() if value is not None}
    if smoke:
        return _smoke(values, given, out)
    arguments, config = build({**values, **REPLACED})
    config.output_dir = config.output_dir if out is None else str(out)
    return _measure(arguments, config, given)


def _measure(arguments: RunArguments, config: ROSUConfig, given: Mapping[str, Any]) -> tuple[Diagnosis, Path, bool]:
    arguments.check_run()
    arguments = replace(arguments, overwrite=True)  # checkpoints in output_dir are no obstacle: none is written
    plan = plan_of(arguments, config, given)
    prepared = prepare(Recipe(arguments, config))
    result = measure_prepared(prepared, plan, name=arguments.model_name_or_path)
    return result, Path(config.output_dir), bool(config.should_save)


def measure_prepared(prepared: Prepared, plan: Plan, *, name: str | None) -> Diagnosis:
    """The diagnosis of a run that is ready to begin."""
    forget, retain = prepared.loaded.forget, prepared.loaded.retain
    whole: Any = ConcatDataset(forget) if prepared.recipe.representation_level else forget
    return measure_trainer(prepared.trainer, whole, retain, plan, name=name)


def _smoke(values: Mapping[str, Any], given: Mapping[str, Any], out: Path | None) -> tuple[Diagnosis, Path, bool]:
    """The recipe's settings on the demo's toy world; without ``out`` in a folder where nothing real is overwritten."""
    from ...experiments.demo.run import SMOKE as TOY
    from ...experiments.demo.world import build_world, small_llama
    from ...toys.recipe import toy_values

    recipe = build({**values, **TOY_SETTINGS, **REPLACED})
    arguments, config = recipe
    folder = Path(config.output_dir) / "smoke" if out is None else out
    if recipe.representation_level:  # reads its model from a checkpoint
        with TemporaryDirectory() as toys:
            arguments, config = build({**toy_values(values, Path(toys)), **REPLACED, "output_dir": str(folder)})
            return _measure(arguments, config, {**given, **SMOKE})
    config.output_dir = str(folder)
    world = build_world(config.seed, people=TOY.people)
    model = small_llama(len(world.tokenizer), config.seed, hidden=TOY.hidden, layers=TOY.layers)
    prepared = assemble(recipe, Loaded(model, world.tokenizer, world.data["forget"], world.data["retain"]))
    result = measure_prepared(prepared, plan_of(arguments, config, {**given, **SMOKE}), name="toy")
    return result, folder, bool(config.should_save)


def plan_of(arguments: RunArguments, config: ROSUConfig, given: Mapping[str, Any]) -> Plan:
    """What to measure; batch sizes are the run's windows unless given."""
    window = prod((config.train_batch_size, config.gradient_accumulation_steps, config.world_size))
    follows = {
        "forget_batch_size": window,
        "retain_batch_size": window * arguments.retain_per_forget,
        "micro_batch_size": config.train_batch_size,
        "rho": config.rho,
        "seed": config.seed,
    }
    return Plan(**{**follows, **given})


def measure_trainer(
    trainer: Any, forget: Any, retain: Any, plan: Plan, *, name: str | None = None, progress: bool = True
) -> Diagnosis:
    """Coupling under a trainer's own losses, precision and layout, at the weights it would start from."""
    state = trainer.accelerator

    def measure() -> Diagnosis:
        model = trainer.model_wrapped
        windows = Windows(
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
            setup={"model": name, "layout": trainer.layout},
            mean_over_ranks=trainer.mean_over_ranks,
            compute_dtype=compute_dtype(state),
            before=lambda: trainer.compute_references(model),
            after_pair=trainer.end_window,
            progress=progress,
        )

    return instead_of_training(trainer, measure)
