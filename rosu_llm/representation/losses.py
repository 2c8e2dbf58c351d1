"""Losses of hidden activations h at one layer against those of the initial model, h₀ (paper, Algorithm 3).

    forget   ‖h + σ − h₀‖²   raised; σ is a little noise, without which the gradient at the start would vanish
    retain   ‖h − h₀‖²       lowered
    rmu      ‖h − c·u‖²      lowered (so its negative is raised): steer towards a random direction u

Reductions, with n tokens, b sequences and hidden size H:

    token_mean   ½ Σ ‖·‖² / n       the default: does not depend on length
    paper        ½ Σ ‖·‖² / b       the paper's formula to the letter, ‖·‖ over all tokens of a sequence
    rmu            Σ ‖·‖² / (n·H)   mean over everything, as RMU's code has it

All arithmetic is float32 whatever the model computes in: σ would vanish in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import ConfigError, unknown
from ..losses.language import IGNORE
from ..losses.registry import Batch, LossContext, register_loss

REDUCTIONS = ("token_mean", "paper", "rmu")
NOISE_SHAPES = ("hidden", "token")


def unit_of(reduction: str, mask_padding: bool, answers_only: bool = False) -> str:
    """What a sum under ``reduction`` is divided by."""
    if reduction not in REDUCTIONS:
        raise unknown("reduction", reduction, REDUCTIONS)
    if reduction == "paper":
        return "row"
    if answers_only:
        return "label"
    return "position" if mask_padding else "place"


@dataclass(frozen=True)
class RepresentationContext:
    """What the losses compare, and how they add it up.

    Attributes:
        activations: gives (h, h₀) for a batch, [batch, length, hidden].
        reduction: one of :data:`REDUCTIONS`.
        mask_padding: leave padded positions out.
        answers_only: leave out all but the tokens of answers (label ≠ −100), as RMU on questions and answers does.
        noise: σ for activations of a given shape; None for none.
        control: c·u for a batch, broadcastable to its activations.
    """

    activations: Callable[[Batch], tuple[Tensor, Tensor]]
    reduction: str = "token_mean"
    mask_padding: bool = True
    answers_only: bool = False
    noise: Callable[[Tensor], Tensor] | None = None
    control: Callable[[Batch, Tensor], Tensor] | None = None

    def total(self, residual: Tensor, batch: Batch) -> Tensor:
        """The size of a float32 residual, summed over units."""
        squares = residual.square().sum(-1)
        if self.answers_only:
            squares = squares * (batch["labels"] != IGNORE).to(squares.dtype)
        elif self.mask_padding and "attention_mask" in batch:
            squares = squares * batch["attention_mask"].to(squares.dtype)
        return squares.sum() * (1.0 / residual.shape[-1] if self.reduction == "rmu" else 0.5)


@register_loss("representation", unit="position", reference="activations")
def representation(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """‖h + σ − h₀‖², with σ where the context has noise (the forget loss)."""
    given = _given(context)
    current, initial = given.activations(batch)
    residual = current.float() - initial.float()
    if given.noise is not None:
        residual = residual + given.noise(residual)
    return given.total(residual, batch)


@register_loss("rmu", unit="position", roles=("forget",), reference="activations")
def rmu(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """−‖h − c·u‖²: raised, it steers activations to the control vector (Li et al., 2024)."""
    given = _given(context)
    assert given.control is not None
    current = given.activations(batch)[0].float()
    return -given.total(current - given.control(batch, current), batch)


def _given(context: LossContext) -> RepresentationContext:
    if context.representation is None:
        raise ConfigError(
            "Losses of hidden activations need a layer to look at: use RepresentationTrainer (rosu train does so when "
            "forget_loss and retain_loss are of this kind), not ROSUTrainer."
        )
    given: RepresentationContext = context.representation
    return given


def bootstrap_noise(seed: int, step: int, std: float, shape: str) -> Callable[[Tensor], Tensor]:
    """σ ~ N(0, σ_b² I), the same on every rank and for every micro-batch of a step.

    ``hidden``: one vector for all tokens of all sequences; ``token``: one per position, shared by the sequences.
    Drawn on the CPU, so that it does not depend on the device.
    """

    def noise(like: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(_mix(seed, step, 0))
        size = like.shape[-1:] if shape == "hidden" else like.shape[-2:]
        return (std * torch.randn(size, generator=generator)).to(like.device)

    return noise


def control_vectors(seed: int, coefficient: float) -> Callable[[Batch, Tensor], Tensor]:
    """c·u with u a unit vector of uniform numbers, one per forget corpus, the same throughout the run."""

    def control(batch: Batch, like: Tensor) -> Tensor:
        rows = batch["corpus"].tolist() if "corpus" in batch else [0] * like.shape[0]
        known = {c: _unit(seed, c, like.shape[-1]) for c in set(rows)}
        return (coefficient * torch.stack([known[c] for c in rows])).to(like.device).unsqueeze(1)

    return control


def _unit(seed: int, corpus: int, size: int) -> Tensor:
    vector = torch.rand(size, generator=torch.Generator().manual_seed(_mix(seed, corpus, 1)))
    unit: Tensor = vector / vector.norm()
    return unit


def _mix(seed: int, index: int, stream: int) -> int:
    return ((seed * 1_000_003 + index) * 2 + stream) & 0x7FFF_FFFF_FFFF_FFFF
