"""From settings to trained models: the one before unlearning, the retrained one, and the trainer that unlearns.

All three go through :class:`~rosu_llm.vision.trainer.VisionTrainer`; training from scratch is retain descent (``ft``)
on what is to be learned. A model that is trained already is read from its folder, and one that was interrupted goes
on from its last epoch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, DataError
from ..experiments.attempt import cell_key, train_quietly
from ..files import check_writable, read_json
from .batches import ImageCollator, ImagePairs, PlainImages, batch_ratio, channel_statistics
from .clock import Clock
from .images import Images
from .metrics import accuracy, mia_efficacy, predictions, true_class
from .models import DESCRIPTION, MODELS, WEIGHTS, build_model, load_model, save_model
from .settings import VisionArguments, VisionConfig
from .splits import Split, make_split
from .trainer import VisionTrainer, check_statistics

#: Nothing is reported or saved on the way; results are measured in memory.
QUIET: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_steps": 50}
#: Drops of the learning rate in training from scratch: epochs 100 and 150 of 200.
DROPS = [0.5, 0.75]

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Bench:
    """Data and models of one data set.

    Args:
        train, test: the images.
        arguments: how models are made and what is forgotten.
        folder: where trained models are kept.
        common: settings of Trainer for every training (``use_cpu``, ``bf16``, …).
    """

    train: Images
    test: Images
    arguments: VisionArguments
    folder: Path
    common: Mapping[str, Any]
    #: Role → how long the model of that role took that was trained or read last; None where that is not known.
    seconds: dict[str, float | None] = field(default_factory=dict)

    def split(self, seed: int, arguments: VisionArguments | None = None) -> Split:
        """What a seed forgets."""
        own = arguments or self.arguments
        return make_split(
            self.train,
            self.test,
            protocol=own.protocol,
            seed=seed,
            forget_class=own.forget_class,
            forget_share=own.forget_share,
            validation_share=own.validation_share,
            validation_seed=own.pretrain_seed,
            test_forgotten_class=own.test_forgotten_class,
        )

    @cached_property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation by which pixels are normalised."""
        mean, std = channel_statistics(self.train.pixels)
        own = self.arguments
        return tuple(own.mean) if own.mean else mean, tuple(own.std) if own.std else std

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What makes two trained models the same: the images themselves, and how they were trained on."""
        names = (
            "model",
            "width",
            "augment",
            "pretrain_epochs",
            "pretrain_lr",
            "pretrain_batch_size",
            "validation_share",
        )
        sums = [
            int(images.pixels.sum(dtype=torch.int64)) * 31 + int(images.labels.sum())
            for images in (self.train, self.test)
        ]
        own = {name: getattr(self.arguments, name) for name in names}
        own |= {name: True for name in ("bf16", "fp16", "tf32") if self.common.get(name)}
        images = [len(self.train), len(self.test), len(self.train.classes), *sums]
        return {**own, "images": images, "statistics": [list(part) for part in self.statistics]}

    def new_model(self, seed: int) -> nn.Module:
        """With initial weights."""
        own = self.arguments
        classes = len(self.train.classes)
        return build_model(own.model, classes=classes, width=own.width, seed=seed, side=self.train.side)

    @cached_property
    def device(self) -> torch.device:
        """Where models are trained and measured."""
        found: torch.device = VisionConfig(**{**QUIET, **self.common}, output_dir=str(self.folder)).device
        return found

    @cached_property
    def shape(self) -> nn.Module:
        """A model of the kind that is trained, to look at."""
        return self.new_model(0)

    def check_training(self, split: Split) -> None:
        """Raise for settings by which no model can be trained or retrained."""
        size = self.arguments.pretrain_batch_size
        check_statistics(self.shape, {"pretrain_batch_size": size})
        if len(split.retain) < size:
            raise DataError(
                f"pretrain_batch_size={size}, and {len(split.retain)} images are kept: not one batch of them. Lower it."
            )

    def check_unlearning(self, split: Split, arguments: VisionArguments, config: VisionConfig) -> None:
        """Raise for settings by which no model can be unlearned."""
        names = ("forget_batch_size", "retain_batch_size")
        items, _, retain_each = batch_ratio(arguments.forget_batch_size, arguments.retain_batch_size)
        if config.batch_norm != "eval":
            check_statistics(self.shape, {name: getattr(arguments, name) for name in names}, "or batch_norm='eval'")
        if config.forget_until == "holdout" and (split.forgotten_class is not None or len(split.validation) == 0):
            why = (
                f"validation_share={arguments.validation_share} holds no image out: give e.g. 0.05"
                if split.forgotten_class is None
                else "unseen images of the class are recognised as well, while a model without the class knows none of "
                "them: give a number, e.g. the loss of guessing, 2.3 for ten classes"
            )
            raise ConfigError(f"forget_until='holdout' has no level to stop at here: {why}.")
        if config.dataloader_drop_last and -(-len(split.retain) // retain_each) < items:
            raise DataError(
                f"retain_batch_size={arguments.retain_batch_size}, and {len(split.retain)} images are kept: not one "
                "batch of them. Lower it."
            )

    def learned(self, steps: Progress) -> nn.Module:
        """The model before unlearning: trained on everything but the validation images."""
        split = self.split(0)
        rows = torch.cat([split.forget, split.retain]).sort().values
        return self._fitted("learned", rows, self.arguments.pretrain_seed, steps)

    def retrained(self, split: Split, seed: int, steps: Progress) -> nn.Module:
        """The model that never saw what is forgotten."""
        return self._fitted("retrained", split.retain, seed, steps)

    def _fitted(self, role: str, rows: Tensor, seed: int, steps: Progress) -> nn.Module:
        model = self.new_model(seed)
        key = cell_key({**self.identity, "rows": rows.tolist()}, {}, seed)
        folder = self.folder / f"{role}-{key}"
        if (folder / WEIGHTS).is_file():
            self.seconds[role] = read_json(folder / DESCRIPTION).get("seconds")
            return load_model(folder, model)
        check_writable(folder, f"--out {self.folder.parent}")
        own, checkpoints = self.arguments, folder / "checkpoints"
        config = VisionConfig(
            **{**QUIET, **self.common, "save_strategy": "epoch"},
            output_dir=str(checkpoints),
            method="ft",
            learning_rate=own.pretrain_lr,
            lr_scheduler_type="constant",
            lr_drops=list(DROPS),
            num_train_epochs=own.pretrain_epochs,
            per_device_train_batch_size=own.pretrain_batch_size,
            save_total_limit=1,
            seed=seed,
            resume_from_checkpoint="auto",
        )
        pairs = ImagePairs(None, rows, augment=own.augment, seed=seed)
        trainer = VisionTrainer(model, config, train_dataset=pairs, data_collator=self.collator())
        clock = Clock(folder / "seconds.json")
        trainer.add_callback(clock)
        train_quietly(trainer, steps, resume=config.resume_from_checkpoint)
        self.seconds[role] = clock.seconds
        if trainer.is_world_process_zero():
            about = {"role": role, "seed": seed, "trained_on": len(rows), "seconds": self.seconds[role]}
            save_model(trainer.model, folder, {**about, **self.identity})
            shutil.rmtree(checkpoints, ignore_errors=True)
            (folder / "seconds.json").unlink(missing_ok=True)
        fitted: nn.Module = trainer.model
        return fitted

    def collator(self, *, joint: bool = False) -> ImageCollator:
        """Rows → batches."""
        own = self.arguments.model in MODELS
        return ImageCollator(self.train, *self.statistics, joint=joint, channels_last=own)

    def unlearner(
        self, model: nn.Module, split: Split, arguments: VisionArguments, config: VisionConfig
    ) -> VisionTrainer:
        """A trainer that makes ``model`` forget."""
        items, forget_each, retain_each = batch_ratio(arguments.forget_batch_size, arguments.retain_batch_size)
        config.per_device_train_batch_size = items
        rule = config.rule()
        pairs = ImagePairs(
            split.forget if "forget" in rule.passes else None,
            split.retain,
            forget_each=forget_each,
            retain_each=retain_each,
            augment=arguments.augment,
            seed=config.seed,
        )
        return VisionTrainer(
            model,
            config,
            train_dataset=pairs,
            data_collator=self.collator(joint=config.batch_norm == "joint"),
            memory_dataset=PlainImages(split.retain) if rule.stored or rule.refreshes else None,
            holdout_dataset=PlainImages(split.validation) if config.forget_until == "holdout" else None,
        )

    def measure(self, model: nn.Module, split: Split, *, seed: int = 0) -> dict[str, float]:
        """RA, FA, TA and MIA-Eff, and TA and MIA-Eff on the validation images (``VA``, ``validation_MIA``)."""
        parts = {
            "RA": self.train.take(split.retain),
            "FA": self.train.take(split.forget),
            "TA": self.test.take(split.test),
        }
        if len(split.validation):
            kept = split.validation
            if split.forgotten_class is not None and not self.arguments.test_forgotten_class:
                kept = kept[self.train.labels[kept] != split.forgotten_class]
            parts["VA"] = self.train.take(kept)
        model.to(self.device)  # one that was read from its folder is still on the CPU
        found: dict[str, float] = {}
        sure = {}
        for name, images in parts.items():
            probabilities = predictions(model, images, *self.statistics)
            found[name] = accuracy(probabilities, images.labels)
            sure[name] = true_class(probabilities, images.labels)
        found["MIA"] = mia_efficacy(sure["RA"], sure["TA"], sure["FA"], seed=seed)
        if "VA" in sure:
            found["validation_MIA"] = mia_efficacy(sure["RA"], sure["VA"], sure["FA"], seed=seed)
        return found
