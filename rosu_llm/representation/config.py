"""Parameters of representation-level unlearning: which layer is looked at, which matrices move."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from ..errors import ConfigError, unknown
from ..losses import get_loss
from ..training.chosen import compile_pattern
from ..training.config import MethodArguments, ROSUConfig
from .losses import NOISE_SHAPES, REDUCTIONS

PATHS = ("fast", "plain")


@dataclass
class RepresentationArguments(MethodArguments):
    """The method's parameters with losses of hidden activations. Defaults are the paper's for Zephyr-7B on WMDP."""

    forget_loss: str = field(
        default="representation", metadata={"help": "L_f, raised: representation (‖h+σ−h₀‖²) or rmu (−‖h−c·u‖²)."}
    )
    retain_loss: str = field(default="representation", metadata={"help": "L_r, lowered: representation (‖h−h₀‖²)."})
    reduction: str = field(
        default="token_mean",
        metadata={"help": "token_mean: ½ mean over tokens; paper: ½ sum per sequence; rmu: mean over everything."},
    )
    target_layer: int = field(default=7, metadata={"help": "Layer ℓ whose output is compared, counted from 0."})
    trainable_parameters: str | None = field(
        default=r"layers\.(5|6|7)\.mlp\.down_proj\.weight$",
        metadata={
            "help": "Regular expression: the parameters that are trained; none trains all up to ℓ (path: plain)."
        },
    )
    layer_stack: str | None = field(
        default=None, metadata={"help": "Name of the list of decoder layers, where it cannot be told by its length."}
    )
    noise_std: float = field(default=0.01, metadata={"help": "Bootstrap noise σ_b."})
    noise_shape: str = field(
        default="hidden", metadata={"help": "hidden: one noise vector per step; token: one per position."}
    )
    mask_padding: bool = field(default=True, metadata={"help": "Leave padded positions out of the losses."})
    answers_only: bool = field(
        default=False,
        metadata={"help": "Questions and answers in place of corpora, compared at the answers' tokens alone."},
    )
    steering: float = field(default=6.5, metadata={"help": "rmu: length c of the control vector."})
    path: str = field(
        default="fast",
        metadata={"help": "fast: layers up to ℓ only, frozen ones once per batch; plain: full passes and a copy."},
    )

    def method_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in RepresentationArguments.__dataclass_fields__}

    @property
    def fast(self) -> bool:
        """Whether only a suffix of the layers is run again; not where all of them are trained."""
        return self.path == "fast" and self.trainable_parameters is not None

    @property
    def reductions(self) -> tuple[str, ...]:
        return REDUCTIONS

    def check_method(self) -> None:
        for role in ("forget", "retain"):
            name = getattr(self, f"{role}_loss")
            if get_loss(name, role).reference != "activations":
                raise ConfigError(
                    f"{role}_loss={name!r} is a loss of next-token probabilities, but the other one is a loss of "
                    "hidden activations: the two cannot be mixed. Set both to representation (or forget_loss to rmu)."
                )
        if self.rule().losses:
            raise ConfigError(
                f"method={self.method!r} has next-token losses of its own: leave forget_loss and retain_loss out. "
                "trainable_parameters chooses the same matrices there."
            )
        super().check_method()
        if self.calibrate != "off":
            raise ConfigError(
                f"calibrate={self.calibrate!r} compares next-token losses, which representation-level unlearning does "
                "not compute: set calibrate='off'."
            )
        for name in ("micro_batch_tokens", "padding_free"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name} is for windows of next-token losses, and representation-level unlearning takes them as "
                    "they were collated: leave it out."
                )
        if self.memory_refresh:
            raise ConfigError(
                f"memory_refresh={self.memory_refresh} takes the gradient of all answers of the retain data, and "
                "representation level has none: leave it out, and memory_decay averages over the windows."
            )
        if self.target_layer < 0:
            raise ConfigError(f"target_layer={self.target_layer} must be 0 or more.")
        if self.trainable_parameters is not None:
            compile_pattern("trainable_parameters", self.trainable_parameters)
        for name, choices in (("noise_shape", NOISE_SHAPES), ("path", PATHS)):
            if getattr(self, name) not in choices:
                raise unknown(name, getattr(self, name), choices)
        for name in ("noise_std", "steering"):
            value = getattr(self, name)
            if not (value >= 0.0 and isfinite(value)):
                raise ConfigError(f"{name}={value!r} must be a number ≥ 0.")
        if "forget" not in self.rule().passes:
            raise ConfigError(
                f"method={self.method!r} takes the retain loss alone, which is zero at the initial weights and stays "
                "so: no step is ever taken. Use a method with a forget loss."
            )
        if self.forget_loss == "representation" and self.noise_std == 0.0:
            raise ConfigError(
                "noise_std=0 with forget_loss='representation': at the initial weights both losses and their gradients "
                "are zero, so no step is ever taken. Use the paper's 0.01."
            )


@dataclass
class RepresentationConfig(RepresentationArguments, ROSUConfig):
    """``TrainingArguments`` and the parameters of :class:`~rosu_llm.RepresentationTrainer`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient_checkpointing:
            raise ConfigError(
                "gradient_checkpointing=True saves nothing here: gradients pass through the few trained layers only. "
                "Leave it out."
            )
