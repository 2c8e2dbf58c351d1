"""Diagnose a recipe: load as ``rosu train`` does, let its trainer spread the model, measure instead of training.

The trainer prepares model, losses, precision and layout (one device, DDP, FSDP2, ZeRO); when its training loop begins,
the measurement takes its place and no step is ever taken. So what is measured is what would be trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.utils.data import ConcatDataset
from transformers import TrainerCallback

from ...recipes.prepare import build_trainer, load
from ...recipes.representation_run import build_representation_trainer, load_corpora
from ...recipes.settings import RunArguments, build
from ...representation.config import RepresentationConfig
from ...toys.train import REPLACED as TOY_SETTINGS
from ...training.config import ROSUConfig
from ...training.layout import compute_dtype
from ...training.trainer import ROSUMixin
from ...training.window import PARTS
from .diagnosis import Diagnosis
from .measure import measure_windows
from .windows import Plan, Windows

#: Settings of a run that a diagnosis has no use for: it takes no step, writes no checkpoint and fades no pull.
REPLACED: dict[str, Any] = {
    "max_steps": 1,
    "calibrate": "off",
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "resume_from_checkpoint": None,
    "report_to": [],
    "disable_tqdm": True,
    "push_to_hub": False,
}

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
    trainer: ROSUMixin
    if isinstance(config, RepresentationConfig):
        name, tokenizer, corpora, retain = load_corpora(arguments, config)
        trainer = build_representation_trainer(name, tokenizer, corpora, retain, arguments, config)
        forget: Any = ConcatDataset(corpora)
    else:
        model, tokenizer, forget, retain, holdout = load(arguments, config)
        trainer = build_trainer(model, tokenizer, forget, retain, holdout, arguments, config)
    result = measure_trainer(trainer, forget, retain, plan, name=arguments.model_name_or_path)
    return result, Path(config.output_dir), bool(config.should_save)


def _smoke(values: Mapping[str, Any], given: Mapping[str, Any], out: Path | None) -> tuple[Diagnosis, Path, bool]:
    """The recipe's settings on the demo's toy world; without ``out`` in a folder where nothing real is overwritten."""
    from ...experiments.demo.run import SMOKE as TOY
    from ...experiments.demo.world import build_world, small_llama
    from ...toys.recipe import toy_values

    arguments, config = build({**values, **TOY_SETTINGS, **REPLACED})
    folder = Path(config.output_dir) / "smoke" if out is None else out
    if isinstance(config, RepresentationConfig):  # reads its model from a checkpoint
        with TemporaryDirectory() as toys:
            arguments, config = build({**toy_values(values, Path(toys)), **REPLACED, "output_dir": str(folder)})
            return _measure(arguments, config, {**given, **SMOKE})
    config.output_dir = str(folder)
    world = build_world(config.seed, people=TOY.people)
    model = small_llama(len(world.tokenizer), config.seed, hidden=TOY.hidden, layers=TOY.layers)
    forget, retain = world.data["forget"], world.data["retain"]
    trainer = build_trainer(model, world.tokenizer, forget, retain, None, arguments, config)
    result = measure_trainer(trainer, forget, retain, plan_of(arguments, config, {**given, **SMOKE}), name="toy")
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
            {part: trainer._window_loss(part) for part in PARTS},
            plan,
            trainer.data_collator,
            trainer._prepare_inputs,
            rank=state.process_index,
            world=state.num_processes,
        )
        return measure_windows(
            windows,
            trainer._build_space(model, trainer._raw_optimizer()),
            trainer.method_args,
            setup={"model": name, "layout": trainer.layout},
            mean_over_ranks=trainer._mean_over_ranks,
            compute_dtype=compute_dtype(state),
            before=lambda: trainer._compute_references(model),
            after_pair=getattr(trainer, "_prepared", {}).clear,  # activations kept for a step's passes
            progress=progress,
        )

    instead = _Instead(measure)
    trainer.add_callback(instead)
    try:
        trainer.train()
    except _MeasuredError as done:
        return done.result
    raise AssertionError("the training loop did not begin")


class _MeasuredError(Exception):
    """Leaves the training loop before its first step."""

    def __init__(self, result: Diagnosis) -> None:
        super().__init__("measured")
        self.result = result


class _Instead(TrainerCallback):
    """Measures where training would begin."""

    def __init__(self, measure: Callable[[], Diagnosis]) -> None:
        self._measure = measure

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise _MeasuredError(self._measure())
