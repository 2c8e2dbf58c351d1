"""One clear error for the first of the method's settings that cannot work, alone or beside another."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from ..errors import ConfigError, unknown
from ..geometry import METHODS, build_rule
from ..step.calibration import check_margin
from ..step.schedules import BETA_NAMES, AutoRadius, RhoSchedule
from ..step.step import check_capture

if TYPE_CHECKING:
    from .config import MethodArguments

REDUCTIONS = ("window_tokens", "micro_mean")
#: Where the targets of bounded forgetting may come from, and what they may be of.
SOURCES = ("holdout", "base", "alternates")
#: Those that change with the weights.
FOLLOWING = ("holdout", "alternates")
#: Those with a target for every token.
TOKEN_LEVELS = ("token", "both")
LEVELS = ("sequence", *TOKEN_LEVELS)
#: What happens to samples or tokens beyond their targets.
BEYOND = ("leave", "reverse", "return")
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


def check_settings(settings: MethodArguments) -> None:
    """Raise for the first setting that cannot work; values have their types, and names are resolved."""
    _check_sweep(settings)
    _check_radius(settings)
    settings.beta_schedule()
    settings.amplifier(None if settings.amplify != "auto" else "direct")
    for role in ("forget", "retain"):
        settings.loss(role)
    _check_loss_options(settings)
    if settings.reduction not in settings.reductions:
        raise unknown("reduction", settings.reduction, settings.reductions)
    if settings.micro_batch_tokens is not None and settings.micro_batch_tokens < 0:
        raise ConfigError(f"micro_batch_tokens={settings.micro_batch_tokens!r} must be at least 1, or 0 for none.")
    if settings.micro_batch_tokens and settings.reduction == "micro_mean":
        raise ConfigError(
            "micro_batch_tokens cuts windows anew, and reduction='micro_mean' weighs samples by the micro-batch "
            "they are in: use reduction='window_tokens', or leave micro_batch_tokens out."
        )
    check_capture(settings.capture_dtype, settings.capture_device, settings.rule())
    _check_classifier(settings)
    _check_calibration(settings)
    _check_depth(settings)
    _check_budget(settings)


def _check_sweep(settings: MethodArguments) -> None:
    if not settings.rule().sweeps:
        return
    for name, off in (("forget_until", "off"), ("budget", None), ("capture_dtype", "float32")):
        if getattr(settings, name) != off:
            raise ConfigError(
                f"{name}={getattr(settings, name)!r} acts while weights move, and method={settings.method!r} changes "
                "them once, at the end of its sweep: leave it out."
            )


def _check_radius(settings: MethodArguments) -> None:
    if not isinstance(settings.rho, str):
        RhoSchedule(settings.rho, settings.rho_schedule)
        return
    if settings.rho != "auto":
        raise ConfigError(f"rho={settings.rho!r} is not understood: give a positive number such as 0.4, or 'auto'.")
    AutoRadius(settings.rho_share)
    if settings.rho_schedule != "constant":
        raise ConfigError(
            f"rho='auto' finds ρ at every step, so rho_schedule={settings.rho_schedule!r} has no meaning."
        )
    if settings.rule().surrogate != "retain" or not settings.rule().perturbs:
        raise ConfigError(
            f"rho='auto' is measured by the retain loss at w+δ, which method={settings.method!r} does not compute: "
            "give a number."
        )


def _check_loss_options(settings: MethodArguments) -> None:
    """Raise for values that make no loss, and for options of a loss that is not used."""
    for name in ("npo_beta", "simnpo_beta", "dpo_beta", "undial_beta"):
        if not (getattr(settings, name) > 0.0 and isfinite(getattr(settings, name))):
            raise ConfigError(f"{name}={getattr(settings, name)!r} must be positive and finite.")
    for name in ("wga_beta", "satimp_beta1", "satimp_beta2"):
        if not (getattr(settings, name) >= 0.0 and isfinite(getattr(settings, name))):
            raise ConfigError(f"{name}={getattr(settings, name)!r} must be finite and not negative.")
    used = {name for role in ("forget", "retain") for name in settings.loss(role).options}
    for name, own in LOSS_OPTIONS.items():
        value = getattr(settings, name)
        if name not in used and value != type(settings).__dataclass_fields__[name].default:
            raise ConfigError(
                f"{name}={value!r} is an option of forget_loss {' and '.join(map(repr, own))}, and this is "
                f"forget_loss={settings.forget_loss!r}, which never reads it: leave it out, or change the loss."
            )


def _check_classifier(settings: MethodArguments) -> None:
    """Raise for what is measured in answer tokens, which a classifier has none of."""
    labels = [settings.loss(role).unit == "label" for role in ("forget", "retain")]
    if not any(labels):
        return
    for name, off in (("calibrate", "off"), ("budget", None), ("keep_best", "off")):
        if getattr(settings, name) != off:
            raise ConfigError(
                f"{name}={getattr(settings, name)!r} measures answer tokens, and the loss 'classification' has none: "
                "leave it out."
            )
    if settings.forget_until in ("base", "alternates") or settings.forget_level in TOKEN_LEVELS:
        raise ConfigError(
            f"forget_until={settings.forget_until!r} with forget_level={settings.forget_level!r} is for answers of "
            "several tokens, and the loss 'classification' has one label: give forget_until='holdout' or a number, and "
            "forget_level='sequence'."
        )
    if not all(labels):
        raise ConfigError(
            f"forget_loss={settings.forget_loss!r} and retain_loss={settings.retain_loss!r} are of different models: a "
            "classifier needs 'classification' for both."
        )


def _check_calibration(settings: MethodArguments) -> None:
    if isinstance(settings.calibrate, str) and settings.calibrate not in ("off", "holdout"):
        raise ConfigError(
            f"calibrate={settings.calibrate!r} is not understood: give 'off', 'holdout' or a target loss such as 2.5."
        )
    if settings.calibrate == "off":
        return
    if not isinstance(settings.calibrate, str) and not isfinite(settings.calibrate):
        raise ConfigError(f"calibrate={settings.calibrate!r} is no target loss: give a finite number such as 2.5.")
    check_margin(settings.calibrate_margin)
    if settings.calibrate_every < 1:
        raise ConfigError(f"calibrate_every={settings.calibrate_every!r} must be at least 1.")
    if not settings.rule().pulls:
        pulling = sorted(name for name in METHODS if build_rule(name).pulls)
        raise ConfigError(
            f"method={settings.method!r} has no pull to calibrate: set calibrate='off', or use one of {pulling}."
        )


def _check_depth(settings: MethodArguments) -> None:
    until = settings.forget_until
    if settings.keep_best not in ("off", "depth"):
        raise unknown("keep_best", settings.keep_best, ("off", "depth"))
    if settings.keep_best == "depth" and until == "off":
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
    if not (settings.forget_margin > 0.0 and isfinite(settings.forget_margin)):
        raise ConfigError(
            f"forget_margin={settings.forget_margin!r} must be positive: it is the distance from the target at which a "
            "sample has full weight."
        )
    if settings.forget_level not in LEVELS:
        raise unknown("forget_level", settings.forget_level, LEVELS)
    if settings.forget_beyond not in BEYOND:
        raise unknown("forget_beyond", settings.forget_beyond, BEYOND)
    if settings.forget_refresh < 0:
        raise ConfigError(
            f"forget_refresh={settings.forget_refresh!r} must be at least 1 step, or 0 to measure the targets once."
        )
    if settings.forget_refresh and until not in FOLLOWING:
        raise ConfigError(
            f"forget_refresh={settings.forget_refresh!r} measures targets anew, and those of forget_until={until!r} do "
            f"not follow the weights: use {' or '.join(map(repr, FOLLOWING))}, or forget_refresh=0."
        )
    if until == "off":
        if settings.forget_beyond != "leave":
            raise ConfigError(
                f"forget_beyond={settings.forget_beyond!r} has no effect without targets to be beyond: set "
                "forget_until, e.g. 'holdout', or forget_beyond='leave'."
            )
        return
    if settings.forget_refresh and settings.keep_best == "depth":
        raise ConfigError(
            f"keep_best='depth' compares distances to the targets, and forget_refresh={settings.forget_refresh!r} "
            "moves these: set one of them off."
        )
    if settings.forget_level in TOKEN_LEVELS and until == "alternates":
        raise ConfigError(
            f"forget_level={settings.forget_level!r} needs a target for every token, and alternate answers have "
            "others: use 'holdout', 'base' or a number, or forget_level='sequence'."
        )
    spec = settings.loss("forget")
    if spec.unit == "alternate":
        raise ConfigError(
            f"forget_until stops where the loss of the answer is high enough, and forget_loss={settings.forget_loss!r} "
            "computes that of the refusals alone: set forget_until='off', or use forget_loss='idk_dpo'."
        )
    if spec.alternative != "none" and settings.forget_level in TOKEN_LEVELS:
        raise ConfigError(
            f"forget_level={settings.forget_level!r} weighs the tokens of the answer, and forget_loss="
            f"{settings.forget_loss!r} compares two whole answers: use forget_level='sequence'."
        )
    if spec.reference == "activations":
        raise ConfigError("forget_until bounds the loss of answers, and representation level has none: set 'off'.")
    if "forget" not in settings.rule().passes:
        raise ConfigError(f"method={settings.method!r} forgets nothing, so forget_until has no meaning: set 'off'.")
    if settings.forget_beyond != "return":
        return
    rule = settings.rule()
    if "retain" not in rule.passes or rule.alternates or rule.sweeps:
        raise ConfigError(
            f"forget_beyond={settings.forget_beyond!r} adds what is beyond its target to the retain loss, and "
            f"method={settings.method!r} has none in the steps that forget: set forget_beyond='leave', or use a method "
            "such as 'rosu' or 'graddiff'."
        )


def _check_budget(settings: MethodArguments) -> None:
    for name, least in (("budget_every", 1), ("budget_tries", 0)):
        if getattr(settings, name) < least:
            raise ConfigError(f"{name}={getattr(settings, name)!r} must be at least {least}.")
    if settings.budget_measure not in BUDGETS:
        raise unknown("budget_measure", settings.budget_measure, BUDGETS)
    if settings.budget is None:
        if settings.budget_measure != "loss":
            raise ConfigError(
                f"budget_measure={settings.budget_measure!r} has no effect without a budget: set budget, e.g. 0.02, or "
                "leave it out."
            )
        return
    if not (settings.budget > 0.0 and isfinite(settings.budget)):
        limit = "the loss may rise, e.g. 0.02 for 2 %" if settings.budget_measure == "loss" else "KL may go, e.g. 0.02"
        raise ConfigError(f"budget={settings.budget!r} is exceeded from the start: give how far {limit}.")
    if settings.loss("forget").reference == "activations":
        raise ConfigError("budget bounds the loss of answers, which representation level does not compute.")
