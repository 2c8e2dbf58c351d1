"""A vision run as YAML plus flags: what to load and to forget, how models are trained, and how one is unlearned."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple, get_type_hints

from transformers import TrainingArguments

from ..errors import ConfigError, RosuError, one_line, unknown
from ..training.config import ROSUConfig
from ..training.values import coerce
from .splits import PROTOCOLS

#: How BatchNorm normalises in the passes of a step.
BATCH_NORM = ("separate", "joint", "eval")
#: Methods that take no gradient step.
ONE_STEP = ("ff", "iu")


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass
class VisionArguments:
    """What a vision run loads, trains first, and forgets."""

    data: str | None = field(
        default=None, metadata=_help("Folder, npz, cifar10, cifar100, tiny-imagenet or owner/name of the hub.")
    )
    test_data: str | None = field(default=None, metadata=_help("Test images, where data does not hold them."))
    model: str = field(default="resnet18", metadata=_help("resnet18, vgg16_bn, torchvision:NAME or timm:NAME."))
    width: int = field(default=64, metadata=_help("Channels of the first stage; 16 suits a CPU."))
    protocol: str = field(default="random", metadata=_help("classwise or random."))
    forget_class: int | None = field(default=None, metadata=_help("classwise: its number; none takes the seed's."))
    forget_share: float = field(default=0.1, metadata=_help("random: share of every class."))
    validation_share: float = field(
        default=0.05, metadata=_help("Share of training images that nobody trains on, for the choice of settings.")
    )
    test_forgotten_class: bool = field(default=False, metadata=_help("classwise: leave it in the test images."))
    mean: list[float] | None = field(default=None, metadata=_help("Of each channel; none: the training images'."))
    std: list[float] | None = field(default=None, metadata=_help("Likewise."))
    augment: bool = field(default=True, metadata=_help("Random crops and flips wherever images are trained on."))
    pretrain_epochs: int = field(default=200, metadata=_help("Epochs of training, and of retraining."))
    pretrain_lr: float = field(default=0.1, metadata=_help("Their learning rate; a tenth from 1/2, then from 3/4."))
    pretrain_batch_size: int = field(default=128, metadata=_help("Their batch size."))
    pretrain_seed: int = field(default=0, metadata=_help("Of the model before unlearning, the same for all splits."))
    forget_batch_size: int = field(default=128, metadata=_help("Forget images per step and process."))
    retain_batch_size: int = field(default=128, metadata=_help("Retain images per step and process."))
    one_step: str | None = field(default=None, metadata=_help("ff or iu: no training, one edit of the weights."))
    edit_strength: float = field(default=1e-6, metadata=_help("ff: λ of the noise; iu: length α of the step."))
    edit_images: int = field(default=1000, metadata=_help("ff, iu: retain images that curvature is taken from."))

    def check_vision(self) -> None:
        """Raise for the first setting that cannot work."""
        if not self.data:
            raise ConfigError("data is missing: put it in the configuration file or pass --data FOLDER.")
        if self.protocol not in PROTOCOLS:
            raise unknown("protocol", self.protocol, PROTOCOLS)
        if self.one_step is not None and self.one_step not in ONE_STEP:
            raise unknown("one_step", self.one_step, ONE_STEP)
        for name in ("pretrain_epochs", "pretrain_batch_size", "forget_batch_size", "retain_batch_size", "edit_images"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")
        if not self.edit_strength > 0.0:
            raise ConfigError(f"edit_strength={self.edit_strength} edits nothing: give a positive number.")
        for name in ("mean", "std"):
            value = getattr(self, name)
            if value is not None and (len(value) != 3 or (name == "std" and min(value) <= 0.0)):
                raise ConfigError(f"{name}={value} must have three numbers, one per channel (std: positive).")


@dataclass
class VisionConfig(ROSUConfig):
    """:class:`~rosu_llm.ROSUConfig` with the paper's defaults for images."""

    output_dir: str = field(default="rosu-vision", metadata=_help("Where results and models go."))
    forget_loss: str = field(default="classification", metadata=_help("L_f, raised."))
    retain_loss: str = field(default="classification", metadata=_help("L_r, lowered."))
    learning_rate: float = field(default=0.01, metadata=_help("η."))
    momentum: float = field(default=0.9, metadata=_help("Of SGD."))
    weight_decay: float = field(default=5e-4, metadata=_help("Of SGD, for all parameters."))
    num_train_epochs: float = field(default=5, metadata=_help("Times over the retain images."))
    lr_scheduler_type: str = field(default="cosine", metadata=_help("Of η."))
    rho_schedule: str = field(default="cosine", metadata=_help("ρ over the run: constant or cosine."))
    max_grad_norm: float = field(default=0.0, metadata=_help("0: gradients are not clipped."))
    dataloader_drop_last: bool = field(default=True, metadata=_help("No short batch at the end of an epoch."))
    dataloader_pin_memory: bool = field(default=False, metadata=_help("As Trainer's."))
    lr_drops: list[float] = field(
        default_factory=list, metadata=_help("Shares of the run from which η is a tenth, in place of a schedule.")
    )
    batch_norm: str = field(
        default="separate",
        metadata=_help("Statistics: of each part's batch (separate), of both (joint), or the running ones (eval)."),
    )
    l1: float = field(default=0.0, metadata=_help("γ of the penalty γ‖w‖₁, which falls to 0 over the run."))

    def __post_init__(self) -> None:
        if self.batch_norm not in BATCH_NORM:
            raise unknown("batch_norm", self.batch_norm, BATCH_NORM)
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigError(f"momentum={self.momentum} must be at least 0 and below 1.")
        if self.l1 < 0.0:
            raise ConfigError(f"l1={self.l1} would grow weights: give 0 or a small positive number such as 1e-5.")
        if self.l1 > 0.0 and self.fp16:
            raise ConfigError(
                f"l1={self.l1} and fp16: fp16 scales gradients, and the penalty's would be added unscaled: use bf16."
            )
        if any(not 0.0 < drop < 1.0 for drop in self.lr_drops):
            raise ConfigError(f"lr_drops={self.lr_drops} must be shares of the run, e.g. 0.5 0.75.")
        super().__post_init__()


class VisionRecipe(NamedTuple):
    """A vision run, described."""

    arguments: VisionArguments
    config: VisionConfig


def build_vision(values: Mapping[str, Any]) -> VisionRecipe:
    """The two groups of settings, each value as the type of its field and checked."""
    typed = vision_values(values)
    names = {f.name for f in dataclasses.fields(VisionArguments)}
    arguments = VisionArguments(**{k: v for k, v in typed.items() if k in names})
    arguments.check_vision()
    try:
        config = VisionConfig(**{k: v for k, v in typed.items() if k not in names})
    except RosuError:
        raise
    except Exception as error:  # from TrainingArguments' own checks, which raise whatever they meet
        raise ConfigError(one_line(error) or type(error).__name__) from error
    return VisionRecipe(arguments, config)


def vision_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Each value as the type of its field; unknown names are refused."""
    fields: dict[str, Any] = {}
    for kind in (VisionConfig, VisionArguments):
        hints = get_type_hints(kind)
        fields |= {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init}
    for key in values:
        if key not in fields:
            near = get_close_matches(key, fields, n=3, cutoff=0.6)
            hint = f" Did you mean {', '.join(near)}?" if near else " docs/vision.md lists those of vision."
            raise ConfigError(f"Unknown setting {key!r}.{hint}")
    return {key: coerce(key, value, fields[key]) for key, value in values.items()}


def given_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as the user gave them, typed; numbers as numbers where a field also takes words (``rho``, ``beta``)."""
    from ..experiments.config_task import as_number

    return {key: as_number(key, value) for key, value in vision_values(values).items()}


def complete_vision(values: Mapping[str, Any]) -> dict[str, Any]:
    """The canonical settings of a cell: the package's own with their defaults, Trainer's where they are given."""
    from ..experiments.config_task import _APART, as_number, field_defaults

    theirs = {f.name for f in dataclasses.fields(TrainingArguments)} - set(VisionConfig.__annotations__)
    defaults = {**field_defaults(VisionConfig), **field_defaults(VisionArguments)}
    ours = {name: value for name, value in defaults.items() if name not in theirs}
    typed = vision_values(values)
    return {k: as_number(k, v) for k, v in sorted({**ours, **typed}.items()) if k not in _APART}
