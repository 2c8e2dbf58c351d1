"""Forget losses that only OpenUnlearning has, imported by name from the checkout in use.

Its functions return a mean over the batch of something to be *minimised*. Ours return a sum over units of something to
be *raised* (``losses/registry.py``), so each is minus their value times the number of units: on one batch the two agree
exactly, and a window weighs its micro-batches by their units. Losses we have ourselves (nll, npo, simnpo, wga, satimp,
odds, undial) stay ours. ``dpo`` serves its data sets, which draw another refusal whenever a sample is read, so that no
reference can be computed once; where it can, ``idk_dpo`` and ``altpo`` are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from ..errors import ConfigError, DataError
from ..losses import COUNT, LOSSES, LossContext, register_loss
from ..losses.registry import Batch, LossFunction

_INPUTS = ("input_ids", "attention_mask", "labels")


def _raised(function: str, unit: str, batch: Batch, *args: Any, **kwargs: Any) -> Tensor:
    """The value of ``module:name`` in OpenUnlearning, a mean to be minimised, as a sum to be raised."""
    try:
        upstream = resolve_name(function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"This OpenUnlearning checkout has no {function.replace(':', '.')}: {error}.") from error
    loss: Tensor = upstream(*args, **kwargs)[0]
    return -loss * COUNT[unit](batch)


def _inputs(batch: Batch) -> dict[str, Any]:
    return {key: batch[key] for key in _INPUTS if key in batch}


def _reference(context: LossContext) -> Callable[..., Any]:
    """The initial model in the form their functions call it."""
    logits = context.reference_logits
    assert logits is not None
    return lambda **inputs: SimpleNamespace(logits=logits(inputs))


def dpo(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Prefer the alternate answer ("I don't know") over the original."""
    if "alternate" not in batch:
        raise DataError(
            "forget_loss='dpo' compares with alternate answers and the forget data has none: use "
            "experiment=unlearn/tofu/idk, or data/datasets@data.forget=TOFU_QA_forget_idk."
        )
    return _raised(
        "trainer.utils:compute_dpo_loss",
        "sequence",
        batch,
        model=model,
        ref_model=_reference(context),
        win_inputs=_inputs(batch["alternate"]),
        lose_inputs=_inputs(batch),
        beta=context.options["dpo_beta"],
    )


def ceu(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Cross-entropy against a target without the answer token."""
    skipped = int(context.options["ceu_ignore_first"])
    function = "trainer.unlearn.ceu:compute_batch_ceu"
    return _raised(function, "token", batch, model, _inputs(batch), ignore_first_n_answer_tokens=skipped)


_BORROWED: dict[str, tuple[LossFunction, dict[str, Any]]] = {
    "dpo": (dpo, {"unit": "sequence", "reference": "logits", "dpo_beta": 0.1}),
    "ceu": (ceu, {"ceu_ignore_first": 1.0}),
}


def register_losses() -> None:
    """Add them to our registry; a loss that is already registered under the name is kept."""
    for name, (function, description) in _BORROWED.items():
        if name not in LOSSES:
            register_loss(name, roles=("forget",), **description)(function)
