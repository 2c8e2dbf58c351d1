"""Image classification as a :class:`~rosu_llm.experiments.attempt.Task`: cells that are trained, measured and kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..errors import ConfigError
from ..experiments.attempt import Started, Steps
from .batches import normalised
from .clock import Clock
from .fit import QUIET, Bench
from .images import Images, load_images
from .metrics import accuracy, delta_accuracy, predictions
from .one_step.fisher import fisher_forgetting
from .one_step.influence import influence_unlearning
from .settings import VisionArguments, VisionRecipe, build_vision
from .splits import Split

#: Settings of Trainer that training from scratch has, too.
_COMMON = ("use_cpu", "bf16", "fp16", "tf32", "dataloader_num_workers")
#: Settings by which splits and the models trained on them differ.
_SPLIT = (
    "protocol",
    "forget_class",
    "forget_share",
    "validation_share",
    "test_forgotten_class",
    "pretrain_seed",
    "augment",
)
COLUMNS = {"RA": "RA", "FA": "FA", "TA": "TA", "delta": "ΔAcc", "MIA": "MIA-Eff", "minutes": "min"}


class VisionTask:
    """Forget a class or a random share of CIFAR-like images.

    The seed of a cell is that of the split (class-wise: the number of the class) and of unlearning; all cells start
    from one trained model.

    Args:
        values: settings of every cell.
        folder: where trained models are kept.
        images: in place of those that ``data`` names.
        curves: measure RA and FA after every epoch, too.
        seeds: splits that will be used; what cannot work with them is refused here, before anything is trained.
    """

    columns: Mapping[str, str] = COLUMNS
    plotted: tuple[str, ...] = ("RA", "FA", "TA")
    digits = 2
    notes: tuple[str, ...] = (
        "Per cent. ΔAcc: Σ |difference to Retrain| over RA, FA and TA, per seed. MIA-Eff: forget images that the "
        "attack calls non-members; Retrain's is the target.",
    )
    references: Mapping[str, str] = {"before": "before", "retain_only": "Retrain"}

    def __init__(
        self,
        values: Mapping[str, Any],
        folder: Path,
        images: tuple[Images, Images] | None = None,
        *,
        curves: bool = False,
        seeds: Sequence[int] = (),
    ) -> None:
        arguments, config = build_vision({**values, **QUIET, "output_dir": str(folder)})
        train, test = load_images(str(arguments.data), arguments.test_data) if images is None else images
        self.base: Mapping[str, Any] = dict(values)
        common = {name: getattr(config, name) for name in _COMMON if name in values}
        self.bench = Bench(train, test, arguments, folder, common)
        self._curves = curves
        self._gold: dict[int, dict[str, float]] = {}
        self.check([{}], seeds)

    def check(self, rows: Iterable[Mapping[str, Any]], seeds: Sequence[int]) -> None:
        """Raise for a row's settings, or a seed's split, that cannot be trained, retrained or unlearned with."""
        splits = [self.bench.split(seed) for seed in seeds or (0,)]
        for split in splits:
            self.bench.check_training(split)
        for row in rows:
            arguments, config = self._recipe({**self.base, **row}, seeds[0] if seeds else 0, self.bench.folder)
            for split in splits:
                self.bench.check_unlearning(split, arguments, config)

    def _recipe(self, values: Mapping[str, Any], seed: int, folder: Path) -> VisionRecipe:
        recipe = build_vision({**values, **QUIET, "seed": seed, "output_dir": str(folder)})
        changed = [name for name in _SPLIT if getattr(recipe.arguments, name) != getattr(self.bench.arguments, name)]
        if changed:
            raise ConfigError(f"{changed[0]} belongs to the task, not to one of its rows: set it for all of them.")
        return recipe

    def identity(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"task": "vision", **self.bench.identity, **({"curves": True} if self._curves else {})}

    def reference_seeds(self, seeds: Sequence[int]) -> list[int]:
        return list(seeds)

    def reference_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {name: settings[name] for name in _SPLIT}

    def refer(self, name: str, seed: int, steps: Steps) -> Started:
        split = self.bench.split(seed)
        if name == "before":
            model, role = self.bench.learned(steps), "learned"
        else:
            model, role = self.bench.retrained(split, seed, steps), "retrained"
        seconds = self.bench.seconds[role]
        return Started(None, self._measures(model, split, seed, lambda: seconds))

    def start(self, values: Mapping[str, Any], seed: int, folder: Path, steps: Steps) -> Started:
        arguments, config = self._recipe(values, seed, folder)
        model, split = self.bench.learned(steps), self.bench.split(seed)
        model.to(config.device)
        if arguments.one_step is not None:
            begun = time.perf_counter()
            self._edit(model, split, arguments, seed)
            spent = time.perf_counter() - begun
            return Started(None, self._measures(model, split, seed, lambda: spent))
        trainer = self.bench.unlearner(model, split, arguments, config)
        clock, curve = Clock(), list[dict[str, float]]()
        trainer.add_callback(clock)
        if self._curves:
            trainer.add_callback(EpochCurve(self.bench, split, curve, clock))
        measure = self._measures(trainer.model, split, seed, lambda: clock.seconds)
        return Started(trainer, measure, details=lambda: {"log": [*curve, *_losses(trainer)]})

    def _measures(self, model: nn.Module, split: Split, seed: int, spent: Callable[[], float | None]) -> Any:
        def measure() -> dict[str, float]:
            seconds = spent()
            found = self.bench.measure(model, split, seed=seed)
            gold = self.gold(seed)
            found["delta"] = delta_accuracy(found, gold)
            if seconds is not None:
                found["minutes"] = seconds / 60.0
            if "VA" in found:
                found["validation_delta"] = delta_accuracy({**found, "TA": found["VA"]}, {**gold, "TA": gold["VA"]})
            return found

        return measure

    def gold(self, seed: int) -> dict[str, float]:
        """The figures of the retrained model, which is trained if it is not there yet."""
        if seed not in self._gold:
            split = self.bench.split(seed)
            model = self.bench.retrained(split, seed, lambda done, total: None)
            self._gold[seed] = self.bench.measure(model, split, seed=seed)
        return self._gold[seed]

    def _edit(self, model: nn.Module, split: Split, arguments: VisionArguments, seed: int) -> None:
        chosen = torch.randperm(len(split.retain), generator=torch.Generator().manual_seed(seed))
        pixels, labels = self._batch(split.retain[chosen[: arguments.edit_images]], model)
        if arguments.one_step == "ff":
            fisher_forgetting(model, pixels, strength=arguments.edit_strength, seed=seed)
            return
        share = len(split.forget) / (len(split.forget) + len(split.retain))
        batches = {
            name: (self._batch(r, model) for r in getattr(split, name).split(256)) for name in ("forget", "retain")
        }
        strength = arguments.edit_strength
        influence_unlearning(model, **batches, curvature=(pixels, labels), share=share, strength=strength)

    def _batch(self, rows: Tensor, model: nn.Module) -> tuple[Tensor, Tensor]:
        train, device = self.bench.train, next(model.parameters()).device
        return normalised(train.pixels[rows], *self.bench.statistics).to(device), train.labels[rows].to(device)


class EpochCurve(TrainerCallback):
    """RA and FA before the first step and after every epoch, while the clock stands still."""

    def __init__(self, bench: Bench, split: Split, found: list[dict[str, float]], clock: Clock) -> None:
        self._bench, self._found, self._clock = bench, found, clock
        self._parts = {"RA": bench.train.take(split.retain), "FA": bench.train.take(split.forget)}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._measure(0.0, model)

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._measure(float(round(state.epoch or 0)), model)

    def _measure(self, epoch: float, model: Any) -> None:
        entry = {"epoch": epoch}
        with self._clock.paused():
            for name, images in self._parts.items():
                entry[name] = accuracy(predictions(model, images, *self._bench.statistics), images.labels)
        self._found.append(entry)


def _losses(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]
