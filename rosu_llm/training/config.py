"""The method's parameters, and Trainer's with them: the same names in Python, YAML and flags.

:class:`MethodArguments` stands alone so that other trainers (OpenUnlearning's) can carry it beside
their own arguments; :class:`ROSUConfig` is it plus ``TrainingArguments``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Any, get_type_hints

from transformers import TrainingArguments

from ..errors import ConfigError, unknown
from ..geometry import METHODS, BaseRule, build_rule
from ..geometry.methods.registry import OPTIONS
from ..losses import LossSpec, get_loss
from ..step import Amplifier, resolve
from ..step.calibration import check_margin
from ..step.schedules import BETA_NAMES, AutoRadius, BetaSchedule, RhoSchedule
from ..step.step import check_capture
from .chosen import compile_pattern
from .presets import with_named_loss
from .values import coerce

REDUCTIONS = ("window_tokens", "micro_mean")
#: Where the targets of bounded forgetting may come from, and what they may be of.
SOURCES = ("holdout", "base", "alternates")
#: Those that change with the weights.
FOLLOWING = ("holdout", "alternates")
#: Those with a target for every token.
TOKEN_LEVELS = ("token", "both")
LEVELS = ("sequence", *TOKEN_LEVELS)
#: What happens to samples or tokens beyond their targets.
BEYOND = ("leave", "return")
#: What a budget may bound.
BUDGETS = ("loss", "kl")
#: Settings that are a number or one of these names.
NAMES = {
    "rho": ("auto",),
    "beta": BETA_NAMES,
    "calibrate": ("off", "holdout"),
    "forget_until": ("off", *SOURCES),
}

#: Settings that belong to a loss, and the losses that read them.
LOSS_OPTIONS = {
    "npo_beta": ("npo",),
    "simnpo_beta": ("simnpo",),
    "simnpo_delta": ("simnpo",),
    "dpo_beta": ("idk_dpo", "altpo"),
    "undial_beta": ("undial",),
    "wga_beta": ("wga",),
    "satimp_beta1": ("satimp",),
    "satimp_beta2": ("satimp",),
}

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
        default="leave", metadata=_help("What is beyond it: leave it alone, or return it as part of what is kept.")
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
        self._check_sweep()
        self._check_radius()
        self.beta_schedule()
        self.amplifier(None if self.amplify != "auto" else "direct")
        for role in ("forget", "retain"):
            self.loss(role)
        self._check_loss_options()
        if self.reduction not in self.reductions:
            raise unknown("reduction", self.reduction, self.reductions)
        if self.micro_batch_tokens is not None and self.micro_batch_tokens < 0:
            raise ConfigError(f"micro_batch_tokens={self.micro_batch_tokens!r} must be at least 1, or 0 for none.")
        if self.micro_batch_tokens and self.reduction == "micro_mean":
            raise ConfigError(
                "micro_batch_tokens cuts windows anew, and reduction='micro_mean' weighs samples by the micro-batch "
                "they are in: use reduction='window_tokens', or leave micro_batch_tokens out."
            )
        check_capture(self.capture_dtype, self.capture_device, self.rule())
        self._check_classifier()
        self._check_calibration()
        self._check_depth()
        self._check_budget()

    def _coerce(self) -> None:
        if self.trainable_parameters == "none":  # on a command line
            self.trainable_parameters = None
        kind: Any = type(self)
        for name, hint in _method_hints(kind).items():
            if name not in ("beta", "calibrate") and name in self.__dict__:
                setattr(self, name, coerce(name, getattr(self, name), hint))
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

    def _check_loss_options(self) -> None:
        """Raise for values that make no loss, and for options of a loss that is not used."""
        for name in ("npo_beta", "simnpo_beta", "dpo_beta", "undial_beta"):
            if not (getattr(self, name) > 0.0 and isfinite(getattr(self, name))):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be positive and finite.")
        for name in ("wga_beta", "satimp_beta1", "satimp_beta2"):
            if not (getattr(self, name) >= 0.0 and isfinite(getattr(self, name))):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be finite and not negative.")
        used = {name for role in ("forget", "retain") for name in self.loss(role).options}
        for name, own in LOSS_OPTIONS.items():
            value = getattr(self, name)
            if name not in used and value != type(self).__dataclass_fields__[name].default:
                raise ConfigError(
                    f"{name}={value!r} is an option of forget_loss {' and '.join(map(repr, own))}, and this is "
                    f"forget_loss={self.forget_loss!r}, which never reads it: leave it out, or change the loss."
                )

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

    def _check_sweep(self) -> None:
        if not self.rule().sweeps:
            return
        for name, off in (("forget_until", "off"), ("budget", None), ("capture_dtype", "float32")):
            if getattr(self, name) != off:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} acts while weights move, and method={self.method!r} changes them "
                    "once, at the end of its sweep: leave it out."
                )

    def _check_radius(self) -> None:
        if not isinstance(self.rho, str):
            RhoSchedule(self.rho, self.rho_schedule)
            return
        if self.rho != "auto":
            raise ConfigError(f"rho={self.rho!r} is not understood: give a positive number such as 0.4, or 'auto'.")
        AutoRadius(self.rho_share)
        if self.rho_schedule != "constant":
            raise ConfigError(
                f"rho='auto' finds ρ at every step, so rho_schedule={self.rho_schedule!r} has no meaning."
            )
        if self.rule().surrogate != "retain" or not self.rule().perturbs:
            raise ConfigError(
                f"rho='auto' is measured by the retain loss at w+δ, which method={self.method!r} does not compute: "
                "give a number."
            )

    def _check_classifier(self) -> None:
        """Raise for what is measured in answer tokens, which a classifier has none of."""
        labels = [self.loss(role).unit == "label" for role in ("forget", "retain")]
        if not any(labels):
            return
        for name, off in (("calibrate", "off"), ("budget", None), ("keep_best", "off")):
            if getattr(self, name) != off:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} measures answer tokens, and the loss 'classification' has none: "
                    "leave it out."
                )
        if self.forget_until in ("base", "alternates") or self.forget_level in TOKEN_LEVELS:
            raise ConfigError(
                f"forget_until={self.forget_until!r} with forget_level={self.forget_level!r} is for answers of several "
                "tokens, and the loss 'classification' has one label: give forget_until='holdout' or a number, and "
                "forget_level='sequence'."
            )
        if not all(labels):
            raise ConfigError(
                f"forget_loss={self.forget_loss!r} and retain_loss={self.retain_loss!r} are of different models: a "
                "classifier needs 'classification' for both."
            )

    def _check_calibration(self) -> None:
        if isinstance(self.calibrate, str) and self.calibrate not in ("off", "holdout"):
            raise ConfigError(
                f"calibrate={self.calibrate!r} is not understood: give 'off', 'holdout' or a target loss such as 2.5."
            )
        if self.calibrate == "off":
            return
        if not isinstance(self.calibrate, str) and not isfinite(self.calibrate):
            raise ConfigError(f"calibrate={self.calibrate!r} is no target loss: give a finite number such as 2.5.")
        check_margin(self.calibrate_margin)
        if self.calibrate_every < 1:
            raise ConfigError(f"calibrate_every={self.calibrate_every!r} must be at least 1.")
        if not self.rule().pulls:
            pulling = sorted(name for name in METHODS if build_rule(name).pulls)
            raise ConfigError(
                f"method={self.method!r} has no pull to calibrate: set calibrate='off', or use one of {pulling}."
            )

    def _check_depth(self) -> None:
        until = self.forget_until
        if self.keep_best not in ("off", "depth"):
            raise unknown("keep_best", self.keep_best, ("off", "depth"))
        if self.keep_best == "depth" and until == "off":
            raise ConfigError(
                "keep_best='depth' needs targets to be close to: set forget_until, e.g. 'holdout', or keep_best='off'."
            )
        if isinstance(until, str) and until not in ("off", *SOURCES):
            raise ConfigError(
                f"forget_until={until!r} is not understood: give 'off', {', '.join(map(repr, SOURCES))}, or a loss per "
                "token such as 2.5."
            )
        if not isinstance(until, str) and not (isfinite(until) and until > 0.0):
            raise ConfigError(f"forget_until={until!r} is no loss to reach: give a positive number such as 2.5.")
        if not (self.forget_margin > 0.0 and isfinite(self.forget_margin)):
            raise ConfigError(
                f"forget_margin={self.forget_margin!r} must be positive: it is the distance from the target at which a "
                "sample has full weight."
            )
        if self.forget_level not in LEVELS:
            raise unknown("forget_level", self.forget_level, LEVELS)
        if self.forget_beyond not in BEYOND:
            raise unknown("forget_beyond", self.forget_beyond, BEYOND)
        if self.forget_refresh < 0:
            raise ConfigError(
                f"forget_refresh={self.forget_refresh!r} must be at least 1 step, or 0 to measure the targets once."
            )
        if self.forget_refresh and until not in FOLLOWING:
            raise ConfigError(
                f"forget_refresh={self.forget_refresh!r} measures targets anew, and those of forget_until={until!r} do "
                f"not follow the weights: use {' or '.join(map(repr, FOLLOWING))}, or forget_refresh=0."
            )
        if until == "off":
            if self.forget_beyond != "leave":
                raise ConfigError(
                    f"forget_beyond={self.forget_beyond!r} has no effect without targets to be beyond: set "
                    "forget_until, e.g. 'holdout', or forget_beyond='leave'."
                )
            return
        if self.forget_refresh and self.keep_best == "depth":
            raise ConfigError(
                f"keep_best='depth' compares distances to the targets, and forget_refresh={self.forget_refresh!r} "
                "moves these: set one of them off."
            )
        if self.forget_level in TOKEN_LEVELS and until == "alternates":
            raise ConfigError(
                f"forget_level={self.forget_level!r} needs a target for every token, and alternate answers have "
                "others: use 'holdout', 'base' or a number, or forget_level='sequence'."
            )
        spec = self.loss("forget")
        if spec.unit == "alternate":
            raise ConfigError(
                f"forget_until stops where the loss of the answer is high enough, and forget_loss={self.forget_loss!r} "
                "computes that of the refusals alone: set forget_until='off', or use forget_loss='idk_dpo'."
            )
        if spec.alternative != "none" and self.forget_level in TOKEN_LEVELS:
            raise ConfigError(
                f"forget_level={self.forget_level!r} weighs the tokens of the answer, and forget_loss="
                f"{self.forget_loss!r} compares two whole answers: use forget_level='sequence'."
            )
        if spec.reference == "activations":
            raise ConfigError("forget_until bounds the loss of answers, and representation level has none: set 'off'.")
        if "forget" not in self.rule().passes:
            raise ConfigError(f"method={self.method!r} forgets nothing, so forget_until has no meaning: set 'off'.")
        if self.forget_beyond == "leave":
            return
        rule = self.rule()
        if "retain" not in rule.passes or rule.alternates or rule.sweeps:
            raise ConfigError(
                f"forget_beyond={self.forget_beyond!r} adds what is beyond its target to the retain loss, and "
                f"method={self.method!r} has none in the steps that forget: set forget_beyond='leave', or use a method "
                "such as 'rosu' or 'graddiff'."
            )

    def _check_budget(self) -> None:
        for name, least in (("budget_every", 1), ("budget_tries", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least {least}.")
        if self.budget_measure not in BUDGETS:
            raise unknown("budget_measure", self.budget_measure, BUDGETS)
        if self.budget is None:
            if self.budget_measure != "loss":
                raise ConfigError(
                    f"budget_measure={self.budget_measure!r} has no effect without a budget: set budget, e.g. 0.02, or "
                    "leave it out."
                )
            return
        if not (self.budget > 0.0 and isfinite(self.budget)):
            limit = "the loss may rise, e.g. 0.02 for 2 %" if self.budget_measure == "loss" else "KL may go, e.g. 0.02"
            raise ConfigError(f"budget={self.budget!r} is exceeded from the start: give how far {limit}.")
        if self.loss("forget").reference == "activations":
            raise ConfigError("budget bounds the loss of answers, which representation level does not compute.")

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
