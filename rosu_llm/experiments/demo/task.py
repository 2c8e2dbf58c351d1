"""The embedded task of ``rosu demo``, and what the demo makes of it.

Nothing is downloaded, and a retrained model says what the goal is. ``results.json`` holds the cells of the grid
``contenders`` as rows, logs and answers.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

from ... import __version__
from ...data.third_answers import WithAlternates
from ...errors import ConfigError, DataError
from ...recipes.prepare import Loaded, assemble
from ...recipes.settings import WITHOUT_OUTPUT, RunArguments, build, with_preset
from ...training.presets import BOUND, PRESETS
from ..ablate.cells import Selector, plan, run_cells, selector
from ..ablate.grid import Grid, Variant
from ..attempt import ANSWER_COLUMNS, AttemptObserver, Record, Started, Steps, cell_key
from .world import Size, World, answers, build_world, learn, measure, small_llama

_SAME_BOUND = {name: PRESETS["small"][name] for name in (*BOUND, "forget_beyond", "forget_refresh")}
#: Row name → settings that differ from those all have in common, learning rate and length among them.
CONTENDERS: dict[str, dict[str, Any]] = {
    "rosu_small": dict(PRESETS["small"]),
    "rosu": dict(PRESETS["paper"]),
    "minmax": {"method": "minmax"},
    "graddiff": {"method": "graddiff"},
    "graddiff_bounded": {"method": "graddiff", **_SAME_BOUND},
    "npo": {"method": "graddiff", "forget_loss": "npo"},
}

#: What ablations and searches on this task start from; docs/ablations.md was made with it.
COMMON: dict[str, Any] = {
    "rho": 0.4,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 16,
    "num_train_epochs": 20,
    "max_grad_norm": 1.0,
}
#: The demo itself: half the rate, twice as long, the same for all contenders.
SCHEDULE: dict[str, Any] = {"learning_rate": 1e-3, "num_train_epochs": 40}

#: The models to compare with, and the contenders.
LABELS = {
    "before": "before",
    "retain_only": "retain-only (gold)",
    "rosu_small": "ROSU, bounded*",
    "rosu": "ROSU, paper",
    "minmax": "min-max",
    "graddiff": "grad. difference",
    "graddiff_bounded": "grad. difference, bounded*",
    "npo": "NPO",
}
FIGURES = {**ANSWER_COLUMNS, "degenerate": "degenerate"}
COLUMNS = {**FIGURES, "seconds": "sec"}
#: Settings of what to load that have a meaning here.
_LOADING = {"preset", "retain_per_forget", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"}


class DemoTask:
    """Ten fictitious people are forgotten; every cell of a seed starts from the same weights.

    Args:
        values: settings in place of the demo's own.
        folder: where the trained model of each seed is kept.
    """

    columns: Mapping[str, str] = FIGURES
    plotted: tuple[str, ...] = ("retain_em", "forget_em", "mia_auc")
    digits = 3
    references: Mapping[str, str] = {name: LABELS[name] for name in ("before", "retain_only")}
    notes: tuple[str, ...] = (
        "forget EM and MIA AUC should match the gold row, not be as low as possible; retain should stay as before.",
    )

    def __init__(self, size: Size, values: Mapping[str, Any], folder: Path) -> None:
        for f in dataclasses.fields(RunArguments):
            if f.name in values and f.name not in _LOADING:
                raise ConfigError(
                    f"{f.name} has no place in the task 'demo', which brings its own model and data: leave it out, or "
                    "describe your task with --config FILE."
                )
        # a preset stays one: what of it goes along depends on what else a run sets
        chosen = with_preset(values).keys() - values.keys()
        ours = {name: value for name, value in COMMON.items() if name not in chosen}
        self.base: Mapping[str, Any] = {**ours, "use_cpu": True, **size.overrides, **values}
        self._size, self._folder = size, folder
        self._world = lru_cache(maxsize=1)(lambda seed: build_world(seed, people=size.people, refusals=size.refusals))

    def identity(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        size = {k: v for k, v in dataclasses.asdict(self._size).items() if k != "overrides"}
        return {"task": "demo", **{k: v for k, v in size.items() if k != "refusals" or v}}

    def reference_seeds(self, seeds: Sequence[int]) -> list[int]:
        return list(seeds)

    def reference_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def refer(self, name: str, seed: int, steps: Steps) -> Started:
        world = self._world(seed)
        if name == "before":
            model = self._taught(world, seed, steps)
        else:
            model = self._teach(world, world.data["retain"].samples, seed, steps)
        return Started(None, lambda: measure(model, world), details=lambda: {"answers": answers(model, world)})

    def start(self, values: Mapping[str, Any], seed: int, folder: Path, steps: Steps) -> Started:
        recipe = build({**values, **WITHOUT_OUTPUT, "seed": seed, "output_dir": str(folder)})
        if recipe.representation_level and not getattr(recipe.config, "answers_only", False):
            raise ConfigError(
                "The task 'demo' has questions and answers, and this level reads plain text: set answers_only, or use "
                "--config FILE."
            )
        if recipe.config.loss("forget").alternative == "refusals" and not self._size.refusals:
            raise ConfigError(
                f"The model of the task 'demo' knows no refusals, and forget_loss={recipe.config.forget_loss!r} needs "
                "some: compare it with others by 'rosu sweep --methods', or use altpo."
            )
        world = self._world(seed)
        model = self._taught(world, seed, steps)
        forget: Any
        forget, retain, held_out = (world.data[split] for split in ("forget", "retain", "calibration"))
        third = recipe.config.loss("forget").alternative
        if third != "none":
            forget = WithAlternates(forget, world.third_answers(third, seed))
        # at representation level the trainer reads the layers it needs itself
        source = str(self._place(seed)) if recipe.representation_level else model
        trainer = assemble(recipe, Loaded(source, world.tokenizer, forget, retain, held_out)).trainer

        def details() -> dict[str, Any]:
            log = [entry for entry in trainer.state.log_history if "loss" in entry]
            return {"log": log, "answers": answers(trainer.model, world)}

        return Started(trainer, lambda: measure(trainer.model, world), details=details)

    def _taught(self, world: World, seed: int, steps: Steps) -> Any:
        """The model that knows everybody: read from its folder, or taught and put there whole."""
        from transformers import LlamaForCausalLM

        folder = self._place(seed)
        if not folder.is_dir():
            samples = [*world.data["forget"].samples, *world.data["retain"].samples]
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            self._teach(world, samples, seed, steps).save_pretrained(partial)
            world.tokenizer.save_pretrained(partial)
            os.replace(partial, folder)
        return LlamaForCausalLM.from_pretrained(folder)

    def _place(self, seed: int) -> Path:
        return self._folder / f"demo-seed{seed}-{cell_key(self.identity({}), {}, seed)}"

    def _teach(self, world: World, samples: list[Any], seed: int, steps: Steps) -> Any:
        size = self._size
        model = small_llama(len(world.tokenizer), seed, hidden=size.hidden, layers=size.layers)
        learn(model, samples, epochs=size.learning_epochs, seed=seed, progress=steps)
        return model


class DemoDocument(TypedDict):
    """Everything the demo found; rows are averaged over seeds, logs and answers are those of the first seed.

    A row holds ``method``, every figure, and ``seconds`` of training; an entry of ``per_seed`` the ``seed`` and its
    ``rows``; the settings what all contenders have in ``common``, and what each has of its own (``methods``).
    An answer entry holds ``split``, ``question``, ``truth``, ``before``, and the answer of each contender by its name.
    """

    rows: list[dict[str, Any]]
    per_seed: list[dict[str, Any]]
    settings: dict[str, dict[str, Any]]
    logs: dict[str, list[dict[str, float]]]
    answers: list[dict[str, str]]
    versions: dict[str, str]


def contenders_grid(methods: Sequence[str] = tuple(CONTENDERS)) -> Grid:
    """The variants that the demo runs."""
    variants = tuple(Variant(LABELS[name], CONTENDERS[name]) for name in methods)
    return Grid("contenders", "Forget ten fictitious people, keep the others", variants)


def demo_document(select: Selector, seeds: Sequence[int], methods: Sequence[str] = tuple(CONTENDERS)) -> DemoDocument:
    """Raises where a cell failed: a comparison that lacks a row is none."""
    names = {"before": "", "retain_only": "", **dict.fromkeys(methods, "contenders")}
    records = {name: select(grid, LABELS[name]) for name, grid in names.items()}
    for name, by_seed in records.items():
        for seed, record in by_seed.items():
            if record.error:
                raise DataError(f"{LABELS[name]}, seed {seed}, failed: {record.error}")
    rows: dict[int, list[dict[str, Any]]] = {seed: [] for seed in seeds}
    for name, by_seed in records.items():
        for seed, own in rows.items():
            own.append({"method": name, **by_seed[seed].metrics, "seconds": by_seed[seed].training_seconds})
    first = {name: by_seed[seeds[0]] for name, by_seed in records.items()}
    return {
        "rows": [_average(group) for group in zip(*rows.values(), strict=True)],
        "per_seed": [{"seed": seed, "rows": own} for seed, own in rows.items()],
        "settings": {"common": {**COMMON, **SCHEDULE}, "methods": CONTENDERS},
        "logs": {name: first[name].log for name in methods},
        "answers": _answers({name: first[name] for name in ("before", *methods)}),
        "versions": {
            "rosu_llm": __version__,
            **{name: version(name) for name in ("torch", "transformers")},
            "python": platform.python_version(),
        },
    }


def run_demo(
    size: Size,
    seeds: Sequence[int],
    observer: Callable[[int], AbstractContextManager[AttemptObserver]],
    methods: Sequence[str] = tuple(CONTENDERS),
) -> DemoDocument:
    """Run the contenders on every seed; ``observer`` makes who watches, from the number of models."""
    with TemporaryDirectory() as scratch:
        task = DemoTask(size, {**SCHEDULE, **size.overrides}, Path(scratch) / "models")
        cells, rows = plan(task, [contenders_grid(methods)], seeds)
        with observer(len(cells)) as watching:
            records = run_cells(cells, task, Path(scratch), watching)
    return demo_document(selector(rows, records), seeds, methods)


def _average(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {key: value if key == "method" else mean(row[key] for row in group) for key, value in group[0].items()}


def _answers(records: dict[str, Record]) -> list[dict[str, str]]:
    result = []
    for same in zip(*(record.answers for record in records.values()), strict=True):
        question = {key: text for key, text in same[0].items() if key != "answer"}
        result.append({**question, **{name: entry["answer"] for name, entry in zip(records, same, strict=True)}})
    return result
