"""Losses by name: plain functions that return a *sum* over their units (tokens or sequences).

Sums, not means, because a window's loss is its total over its total count: then 8×1 micro-batches
equal 1×8 also when they are ragged. The sign convention is the paper's: the forget loss is *raised*
and the retain loss *lowered*. Objectives that are published as something to minimise on the forget
set (NPO, SimNPO) are therefore registered as their negative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..errors import ConfigError, unknown

Batch = Mapping[str, Any]

#: Hidden states [positions, hidden size], weight [vocabulary, hidden size] and bias of the output layer.
InitialAnswers = tuple[Tensor, Tensor, Tensor | None]

UNITS = ("token", "sequence", "position", "place", "label", "row", "alternate")
REFERENCES = ("none", "logprobs", "distributions", "logits", "activations")
#: What the third answer of a sample may be, where a loss needs one.
ALTERNATIVES = ("none", "refusals", "alternates")


@dataclass(frozen=True)
class LossContext:
    """What a loss may need besides model and batch.

    Attributes:
        options: hyper-parameters by name (``npo_beta``, ``simnpo_beta``, ``simnpo_delta``).
        reference_logprobs: sequence log-probabilities of this batch under the initial model.
        reference_logits: function giving the initial model's logits for a batch.
        reference_hidden: function giving the initial model's last hidden states at the answer positions of a batch,
            and its output layer's weight and bias; None where ``reference_logits`` is to be asked.
        gate: weighs the gradients of bounded samples (:class:`~rosu_llm.losses.depth.Gate`).
        representation: what losses of hidden activations need (``representation.losses.RepresentationContext``).
    """

    options: Mapping[str, float] = field(default_factory=dict)
    reference_logprobs: Callable[[Batch], Tensor] | None = None
    reference_logits: Callable[[Batch], Tensor] | None = None
    reference_hidden: Callable[[Batch], InitialAnswers | None] | None = None
    gate: Any = None
    representation: Any = None


LossFunction = Callable[[nn.Module, Batch, LossContext], Tensor]


@dataclass(frozen=True)
class LossSpec:
    """A registered loss.

    Attributes:
        function: returns the sum over units of one batch.
        unit: what its sum is divided by: ``token`` (answer tokens), ``sequence`` (with an answer), ``position``
            (attended tokens), ``place`` (all tokens, padding too), ``label`` (answer tokens as inputs, or classes),
            ``row`` (all sequences) or ``alternate`` (tokens of the third answers).
        roles: where it makes sense, ``forget`` and/or ``retain``.
        reference: ``none``, ``logprobs`` (one number per sample, computed up front), ``distributions`` (at the answer
            positions; of hidden states computed up front, where samples can be listed), ``logits`` (needs the initial
            model at every step) or ``activations`` (of one layer: ``RepresentationTrainer``).
        keys: what a batch must hold for it, where that is not what the trainer's batches hold anyway.
        options: names and defaults of its hyper-parameters.
        alternative: the third answer that it needs of every sample: ``none``, ``refusals`` or ``alternates``.
    """

    name: str
    function: LossFunction
    unit: str
    roles: tuple[str, ...]
    reference: str = "none"
    keys: tuple[str, ...] | None = None
    options: Mapping[str, float] = field(default_factory=dict)
    alternative: str = "none"


LOSSES: dict[str, LossSpec] = {}

#: Registered by ``rosu_llm.representation``, which stands above this folder.
_OF_ACTIVATIONS = ("representation", "rmu")


def register_loss(
    name: str,
    *,
    unit: str = "token",
    roles: tuple[str, ...] = ("forget", "retain"),
    reference: str = "none",
    alternative: str = "none",
    keys: tuple[str, ...] | None = None,
    **options: float,
) -> Callable[[LossFunction], LossFunction]:
    """Decorator: make ``loss(model, batch, context) -> sum`` available as ``forget_loss``/``retain_loss``."""
    if unit not in UNITS:
        raise unknown("unit", unit, UNITS)
    if reference not in REFERENCES:
        raise unknown("reference", reference, REFERENCES)
    if alternative not in ALTERNATIVES:
        raise unknown("alternative", alternative, ALTERNATIVES)

    def add(function: LossFunction) -> LossFunction:
        LOSSES[name] = LossSpec(name, function, unit, roles, reference, keys, options, alternative)
        return function

    return add


def get_loss(name: str, role: str) -> LossSpec:
    """The loss called ``name``, if it can play ``role``."""
    fitting = [n for n, spec in LOSSES.items() if role in spec.roles]
    if name not in LOSSES and name in _OF_ACTIVATIONS:
        raise ConfigError(
            f"{role}_loss={name!r} is a loss of hidden activations: use RepresentationConfig and "
            "RepresentationTrainer, whose import registers it (rosu train does so by itself)."
        )
    if name not in LOSSES:
        raise unknown(f"{role}_loss", name, fitting)
    if role not in LOSSES[name].roles:
        raise ConfigError(
            f"{role}_loss={name!r} cannot work as a {role} loss; use one of {', '.join(sorted(fitting))}."
        )
    return LOSSES[name]
