"""The embedded task of ``rosu demo``: nothing is downloaded, and a retrained model says what the goal is."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...presentation.demo import COLUMNS
from ...recipes.loading import Loaded
from ...recipes.prepare import assemble
from ...recipes.settings import RunArguments, build
from ..settings import FORCED
from ..store import cell_key
from ..task import Measure, Steps, unlearn
from .contenders import COMMON, LABELS
from .measure import measure
from .run import Size
from .world import World, build_world, learn, small_llama

#: Settings of what to load that have a meaning here.
_LOADING = {"retain_per_forget", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"}


class DemoTask:
    """Ten fictitious people are forgotten; every cell of a seed starts from the same weights.

    Args:
        size: how large.
        values: settings in place of the demo's own.
        folder: where the trained model of each seed is kept.
    """

    columns: Mapping[str, str] = {key: heading for key, heading in COLUMNS.items() if key != "seconds"}
    plotted = ("retain_em", "forget_em", "mia_auc")
    digits = 3
    references: Mapping[str, str] = {name: LABELS[name] for name in ("before", "retain_only")}
    notes = (
        "forget EM and MIA AUC should match the gold row, not be as low as possible; retain should stay as before.",
    )

    def __init__(self, size: Size, values: Mapping[str, Any], folder: Path) -> None:
        for f in dataclasses.fields(RunArguments):
            if f.name in values and f.name not in _LOADING:
                raise ConfigError(
                    f"{f.name} has no place in the task 'demo', which brings its own model and data: leave it out, or "
                    "describe your task with --config FILE."
                )
        self.base = {**COMMON, "use_cpu": True, **size.overrides, **values}
        self._size, self._folder = size, folder
        self._world = lru_cache(maxsize=1)(lambda seed: build_world(seed, people=size.people))

    def identity(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"task": "demo", **{k: v for k, v in dataclasses.asdict(self._size).items() if k != "overrides"}}

    def reference_seeds(self, seeds: Sequence[int]) -> list[int]:
        return list(seeds)

    def reference_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def refer(self, name: str, seed: int, steps: Steps) -> dict[str, float]:
        world = self._world(seed)
        if name == "before":
            return measure(self._taught(world, seed, steps), world)
        return measure(self._teach(world, world.data["retain"].samples, seed, steps), world)

    def run(self, values: Mapping[str, Any], seed: int, folder: Path, *, keep: bool, steps: Steps) -> dict[str, float]:
        trainer, measured = self.prepare(values, seed, folder, steps)
        unlearn(trainer, keep=keep, steps=steps)
        return measured()

    def prepare(self, values: Mapping[str, Any], seed: int, folder: Path, steps: Steps) -> tuple[Any, Measure]:
        """The trainer of a cell before its first step, and what measures its model."""
        recipe = build({**values, **FORCED, "seed": seed, "output_dir": str(folder)})
        if recipe.representation_level:
            raise ConfigError(
                "The task 'demo' measures answers, which representation-level unlearning needs more layers for: use "
                "--config FILE."
            )
        world = self._world(seed)
        model = self._taught(world, seed, steps)
        forget, retain, held_out = (world.data[split] for split in ("forget", "retain", "calibration"))
        trainer = assemble(recipe, Loaded(model, world.tokenizer, forget, retain, held_out)).trainer
        return trainer, lambda: measure(trainer.model, world)

    def _taught(self, world: World, seed: int, steps: Steps) -> Any:
        """The model that knows everybody: read from its folder, or taught and put there whole."""
        from transformers import LlamaForCausalLM

        folder = self._folder / f"demo-seed{seed}-{cell_key(self.identity({}), {}, seed)}"
        if not folder.is_dir():
            samples = [*world.data["forget"].samples, *world.data["retain"].samples]
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            self._teach(world, samples, seed, steps).save_pretrained(partial)
            world.tokenizer.save_pretrained(partial)
            os.replace(partial, folder)
        return LlamaForCausalLM.from_pretrained(folder)

    def _teach(self, world: World, samples: list[Any], seed: int, steps: Steps) -> Any:
        size = self._size
        model = small_llama(len(world.tokenizer), seed, hidden=size.hidden, layers=size.layers)
        epochs = size.learning_epochs
        learn(model, samples, epochs=epochs, seed=seed, progress=lambda done, total, loss: steps(done, total))
        return model
