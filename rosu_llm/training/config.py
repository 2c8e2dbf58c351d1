"""The method's parameters, and Trainer's with them: the same names in Python, YAML and flags.

:class:`MethodArguments` stands alone so that other trainers (OpenUnlearning's) can carry it beside
their own arguments; :class:`ROSUConfig` is it plus ``TrainingArguments``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, get_type_hints

from transformers import TrainingArguments

from ..errors import ConfigError
from ..geometry import METHODS, BaseRule, build_rule
from ..geometry.methods.registry import OPTIONS
from ..losses import LossSpec, get_loss
from ..step import Amplifier, resolve
from ..step.schedules import BetaSchedule, RhoSchedule
from .chosen import compile_pattern
from .method_checks import NAMES, REDUCTIONS, check_settings
from .presets import with_named_loss
from .values import coerce

if TYPE_CHECKING:
    from torch.optim import Optimizer

    NameOrNumber = str | float
else:
    # transformers.HfArgumentParser reads a union with str as its other member and would refuse the names.
    NameOrNumber = str


def _help(text: str) -> dict[str, str]:
    return {"help": text}


def _option(name: str) -> Any:
    """A setting that the methods themselves declare, with their default and description."""
    return field(default=OPTIONS[name].default, metadata=_help(OPTIONS[name].metadata["help"]))


@dataclass
class MethodArguments:
    """Everything that defines the unlearning step. Greek letters are the paper's."""

    # -- the method -----------------------------------------------------------------------------
    method: str = field(default="rosu", metadata=_help("Rule: " + ", ".join(METHODS) + "."))
    forget_loss: str = field(default="nll", metadata=_help("L_f, raised: nll, npo, simnpo, … or a registered name."))
    retain_loss: str = field(default="nll", metadata=_help("L_r, lowered: nll, kl or a registered name."))

    trainable_parameters: str | None = field(
        default=None, metadata=_help("Regular expression: the parameters that are trained, by name; none trains all.")
    )

    # -- the surrogate --------------------------------------------------------------------------
    rho: NameOrNumber = field(default=0.4, metadata=_help("Perturbation radius ρ, or auto: as rho_share says."))
    rho_schedule: str = field(default="constant", metadata=_help("ρ over the run: constant or cosine."))
    rho_share: float = field(
        default=0.1, metadata=_help("rho auto: rise of the retain loss at w+δ to aim at, as a share of it.")
    )
    jacobian: str = _option("jacobian")
    components: str = _option("components")
    tau: float = _option("tau")
    tau_mode: str = _option("tau_mode")
    eps_q: float = _option("eps_q")
    fallback: str = _option("fallback")
    protect_rank: int | None = _option("protect_rank")
    include_mean: bool = _option("include_mean")
    metric: str = _option("metric")
    protect: str = _option("protect")
    memory_decay: float = _option("memory_decay")
    memory_refresh: int = _option("memory_refresh")
    directions: int = _option("directions")

    # -- the amplification ----------------------------------------------------------------------
    beta: NameOrNumber = field(default="tied", metadata=_help("Amplification β: tied (η/ρ), two_phase or a number."))
    beta_start: float = field(default=0.001, metadata=_help("two_phase: β at the first step."))
    beta_high: float = field(default=0.06, metadata=_help("two_phase: β at the end of the warm-up."))
    beta_low: float = field(default=0.012, metadata=_help("two_phase: β afterwards."))
    beta_warmup_ratio: float = field(default=0.1, metadata=_help("two_phase: share of the run spent warming up."))
    amplify: str = field(
        default="auto",
        metadata=_help("How βδ reaches the weights: direct, optimizer, matched; auto picks by optimizer."),
    )
    kappa: float = field(default=0.5, metadata=_help("matched: length of the pull over that of the optimizer's step."))
    calibrate: NameOrNumber = field(
        default="off",
        metadata=_help("Fade the pull as L_f reaches the loss of unseen data: off, holdout, or a target loss."),
    )
    calibrate_margin: float = field(default=1.0, metadata=_help("Loss gap at which the calibrated pull is full."))
    calibrate_every: int = field(default=1, metadata=_help("Steps between measurements of the held-out loss."))

    # -- how deep to forget ---------------------------------------------------------------------
    forget_until: NameOrNumber = field(
        default="off",
        metadata=_help("Leave a forget sample alone once its loss reaches: off, holdout, base, alternates, or a loss."),
    )
    forget_margin: float = field(default=1.0, metadata=_help("Distance from it at which a sample has full weight."))
    forget_level: str = field(
        default="sequence",
        metadata=_help("What reaches it: whole answers (sequence), every token for itself (token), or both."),
    )
    forget_beyond: str = field(
        default="leave",
        metadata=_help(
            "What is beyond it: leave it alone, reverse its gradient, or return it as part of what is kept."
        ),
    )
    forget_draw: bool = field(
        default=True, metadata=_help("holdout: one loss drawn for each sample; false takes their mean for all.")
    )
    forget_refresh: int = field(
        default=0, metadata=_help("Steps after which the targets are measured anew; 0: once, before the first step.")
    )

    keep_best: str = field(
        default="off", metadata=_help("Weights to end with: off (the last step's), or depth (closest to the targets).")
    )

    # -- a budget for what is kept ---------------------------------------------------------------
    budget: float | None = field(
        default=None, metadata=_help("Largest rise of budget_measure on budget data, e.g. 0.02; none is no limit.")
    )
    budget_measure: str = field(
        default="loss",
        metadata=_help("What budget bounds: loss (its relative rise), or kl (from the initial model, nats per token)."),
    )
    budget_every: int = field(default=10, metadata=_help("Steps between looks at the budget data, and of keep_best."))
    budget_tries: int = field(default=3, metadata=_help("How often the run goes back before it stops."))

    # -- baselines ------------------------------------------------------------------------------
    forget_weight: float = _option("forget_weight")
    retain_weight: float = _option("retain_weight")
    reflection: float = _option("reflection")
    orthograd_alpha: float = _option("orthograd_alpha")
    ascent_weight: float = _option("ascent_weight")
    mismatch_weight: float = _option("mismatch_weight")
    normal_weight: float = _option("normal_weight")
    scrub_max_epochs: int = _option("scrub_max_epochs")
    scrub_kl_weight: float = _option("scrub_kl_weight")
    scrub_task_weight: float = _option("scrub_task_weight")
    ssd_alpha: float = _option("ssd_alpha")
    ssd_lambda: float = _option("ssd_lambda")
    fisher: str = _option("fisher")
    npo_beta: float = field(default=0.1, metadata=_help("npo: inverse temperature."))
    simnpo_beta: float = field(default=4.5, metadata=_help("simnpo: inverse temperature."))
    simnpo_delta: float = field(default=0.0, metadata=_help("simnpo: margin."))
    dpo_beta: float = field(default=0.1, metadata=_help("idk_dpo, altpo: inverse temperature."))
    undial_beta: float = field(default=10.0, metadata=_help("undial: amount subtracted from the teacher's logit."))
    wga_beta: float = field(default=1.0, metadata=_help("wga: exponent of the token weights."))
    satimp_beta1: float = field(default=5.0, metadata=_help("satimp: exponent of saturation."))
    satimp_beta2: float = field(default=1.0, metadata=_help("satimp: exponent of importance."))

    # -- arithmetic -----------------------------------------------------------------------------
    reduction: str = field(
        default="window_tokens",
        metadata=_help("window_tokens: sum over the window / its count; micro_mean: mean of micro-batch means."),
    )
    micro_batch_tokens: int | None = field(
        default=None,
        metadata=_help(
            "Tokens, with padding, of the micro-batches into which a window is cut by length; none: as few as leave "
            "their number as it is, 0: leave them as they were collated."
        ),
    )
    padding_free: bool = field(
        default=False,
        metadata=_help("Hand the model every micro-batch as one row without padding, told apart by position ids."),
    )
    capture_dtype: str = field(
        default="float32",
        metadata=_help("Type that the gradients kept within a step are rounded to: float32 (none) or bfloat16."),
    )
    capture_device: str = field(
        default="model",
        metadata=_help("Where they and the backup of the weights are kept: model (its device) or cpu (host memory)."),
    )
    upcast: bool = field(
        default=True,
        metadata=_help("Hold bf16 trainable weights in float32; false keeps them (stochastic rounding of δ)."),
    )

    @property
    def reductions(self) -> tuple[str, ...]:
        """Values that ``reduction`` may have."""
        return REDUCTIONS

    def check_method(self) -> None:
        """Raise one clear error for the first setting that cannot work."""
        self._coerce()
        self._take_name()
        self._take_losses()
        if self.trainable_parameters is not None:
            compile_pattern("trainable_parameters", self.trainable_parameters)
        check_settings(self)

    def _coerce(self) -> None:
        if self.trainable_parameters == "none":  # on a command line
            self.trainable_parameters = None
        kind: Any = type(self)
        for name, hint in _method_hints(kind).items():
            if name not in ("beta", "calibrate") and name in self.__dict__:
                setattr(self, name, coerce(name, getattr(self, name), hint))
        if self.keep_best in (False, "no", "False"):  # YAML reads a bare off as a boolean
            self.keep_best = "off"
        # Flags and YAML 1.1 hand over numbers as text ("0.2", "1e-3").
        for name, names in NAMES.items():
            value = getattr(self, name)
            if "off" in names and (value is False or value == "no"):
                value = "off"  # YAML reads a bare off as a boolean
            if isinstance(value, bool):
                value = str(value).lower()
            if isinstance(value, str):
                try:
                    value = float(value)
                except ValueError:
                    pass
            setattr(self, name, value)

    def _take_name(self) -> None:
        """Write out a method that is named after a forget loss."""
        default = type(self).__dataclass_fields__["forget_loss"].default
        named = with_named_loss(
            {"method": self.method, "forget_loss": None if self.forget_loss == default else self.forget_loss}
        )
        if named["method"] != self.method:
            self.method, self.forget_loss = named["method"], named["forget_loss"]

    def _take_losses(self) -> None:
        """Set the losses that the method is defined with; another one than those and the default is refused."""
        for role, name in self.rule().losses.items():
            given = getattr(self, f"{role}_loss", name)
            default = type(self).__dataclass_fields__[f"{role}_loss"].default if hasattr(self, f"{role}_loss") else name
            if given not in (name, default):
                raise ConfigError(
                    f"method={self.method!r} has a {role} loss of its own, {name!r}: leave {role}_loss={given!r} out, "
                    "or use another method."
                )
            if hasattr(self, f"{role}_loss"):
                setattr(self, f"{role}_loss", name)

    def check_run_of_method(self, args: TrainingArguments) -> None:
        """Raise for training arguments with which the method would do nothing, or spoil everything."""
        if self.rule().alternates and args.max_steps <= 0 and args.num_train_epochs < 2:
            raise ConfigError(
                f"num_train_epochs={args.num_train_epochs:g} with method={self.method!r}, whose first epoch keeps and "
                "whose second forgets: give at least 2, better an odd number such as 5, which ends by keeping."
            )
        if args.fp16:
            self.check_half_precision()

    def check_half_precision(self) -> None:
        """Raise if the method cannot work in fp16."""
        if self.rule().sweeps:
            raise ConfigError(
                f"fp16=True with method={self.method!r}: one squared gradient that overflows spoils all. Use bf16=True."
            )

    # -- the objects these settings describe ----------------------------------------------------

    def rule(self) -> BaseRule:
        """The rule named by ``method``."""
        return build_rule(self.method, **{name: getattr(self, name) for name in OPTIONS})

    def loss(self, role: str) -> LossSpec:
        """The forget or retain loss."""
        own = self.rule().losses.get(role)
        if own is not None and role not in ("forget", "retain"):
            return get_loss(own, "retain")  # lowered, too
        return get_loss(getattr(self, f"{role}_loss"), role)

    def amplifier(self, mode: str | None = None, optimizer: Optimizer | None = None) -> Amplifier:
        """How βδ reaches the weights; ``mode`` in place of ``amplify`` where given."""
        alone = self.components == "delta_only"
        return resolve(mode or self.amplify, self.beta, self.kappa, optimizer, alone=alone)

    def rho_at(self, step: int, total: int) -> float:
        """ρ_t, where it is a number."""
        return RhoSchedule(float(self.rho), self.rho_schedule).at(step, total)

    def beta_schedule(self) -> BetaSchedule:
        """β_t."""
        return BetaSchedule(self.beta, self.beta_start, self.beta_high, self.beta_low, self.beta_warmup_ratio)

    def step_settings(self) -> dict[str, Any]:
        """The arguments of :class:`~rosu_llm.UnlearningStep`."""
        names = (
            "method rho rho_schedule rho_share beta beta_start beta_high beta_low beta_warmup_ratio amplify kappa "
            "capture_dtype capture_device"
        )
        return {name: getattr(self, name) for name in (*names.split(), *OPTIONS)}

    def method_dict(self) -> dict[str, Any]:
        """The method's settings alone, for model cards and result files."""
        return {name: getattr(self, name) for name in MethodArguments.__dataclass_fields__}


@cache
def _method_hints(kind: Any) -> dict[str, Any]:
    """The types of the method's settings, without Trainer's."""
    own = (c for c in kind.__mro__ if issubclass(c, MethodArguments) and not issubclass(c, TrainingArguments))
    return {name: hint for c in own for name, hint in get_type_hints(c).items()}


@dataclass
class ROSUConfig(MethodArguments, TrainingArguments):
    """Configuration of :class:`~rosu_llm.ROSUTrainer`.

    Everything ``transformers.TrainingArguments`` has keeps its meaning. Defaults that differ:
    ``remove_unused_columns=False`` (batches are nested) and ``output_dir="rosu-output"``.
    """

    # Redefined only because TrainingArguments requires one in older versions of transformers.
    output_dir: str = field(default="rosu-output", metadata={"help": "Where checkpoints and the model go."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Must stay false: the columns are nested under forget and retain."}
    )

    def __post_init__(self) -> None:
        self.check_method()
        if self.rule().sweeps:
            self.num_train_epochs = 1.0
        super().__post_init__()
        launched = getattr(self, "mixed_precision", "no")  # a launcher's, where these settings name none
        if launched in ("bf16", "fp16") and not (self.bf16 or self.fp16):
            setattr(self, launched, True)
        self.check_run_of_method(self)
