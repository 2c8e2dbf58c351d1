"""Losses of a causal language model on its answer tokens (labels ≠ −100)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from ..errors import DataError
from .answers import TokenNLL, at_positions, unwrapped, wide
from .registry import Batch, LossContext, register_loss

IGNORE = -100

#: What a model is given whose forward takes any name; of others, what it names.
MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds")


#: The key under which a forget batch may hold another answer to each of its questions, as a batch of its own.
ALTERNATE = "alternate"

#: The key under which a batch may hold the :class:`Positions` of its answer tokens, for whoever knows them already.
POSITIONS = "answer_positions"


class Positions(NamedTuple):
    """Where a batch predicts answer tokens, on its device; how many, in how many sequences; where no padding is.

    Attributes:
        present: flat positions of what is no padding.
        join: the model is to be handed those in one row.
    """

    rows: Tensor
    columns: Tensor
    tokens: int
    sequences: int
    present: Tensor | None = None
    join: bool = False


def model_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """What of a batch the model's forward takes; labels stay out so that it computes no loss of its own."""
    kind: Any = type(unwrapped(model))
    taken = _taken(kind)
    return {name: value for name, value in batch.items() if name in taken}


@lru_cache(maxsize=64)
def _taken(kind: Any) -> frozenset[str]:
    parameters = inspect.signature(kind.forward).parameters
    free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return frozenset({*parameters, *(MODEL_INPUTS if free else ())} - {"self", "labels"})


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Logits in at least float32."""
    return wide(model(**model_inputs(model, batch)).logits)


def answer_mask(labels: Tensor) -> Tensor:
    """Which of the shifted positions predict an answer token; of one label per row, the column of those that count."""
    return (labels[:, 1:] if labels.dim() > 1 else labels[:, None]) != IGNORE


def count_tokens(batch: Batch) -> Tensor:
    """Number of answer tokens."""
    return torch.tensor(batch[POSITIONS].tokens) if POSITIONS in batch else answer_mask(batch["labels"]).sum()


def count_sequences(batch: Batch) -> Tensor:
    """Number of sequences with at least one answer token."""
    if POSITIONS in batch:
        return torch.tensor(batch[POSITIONS].sequences)
    return answer_mask(batch["labels"]).any(-1).sum()


def count_positions(batch: Batch) -> Tensor:
    """Number of attended tokens."""
    mask: Tensor | None = batch.get("attention_mask")
    return count_places(batch) if mask is None else mask.bool().sum()


def count_labels(batch: Batch) -> Tensor:
    """Number of labels: answer tokens as inputs, or classes."""
    labels: Tensor = batch["labels"]
    return (labels != IGNORE).sum()


def count_places(batch: Batch) -> Tensor:
    """Number of tokens, padding included."""
    return torch.tensor(batch["input_ids"].numel())


def alternate_of(batch: Batch) -> Batch:
    """The third answers of a batch."""
    if ALTERNATE not in batch:
        raise DataError(
            f"The forget data has keys {sorted(map(str, batch))} but no {ALTERNATE!r}, which this forget_loss needs: "
            "build the forget data with WithAlternates, or put input_ids, attention_mask and labels of another "
            "answer to each question there; with 'rosu train', set refusals or alternates."
        )
    found: Batch = batch[ALTERNATE]
    own, other = batch["input_ids"], found["input_ids"]
    collated = all(isinstance(ids, Tensor) and ids.dim() == 2 for ids in (own, other))  # the length of one is its rows
    if collated and len(other) != len(own):
        raise DataError(
            f"The forget batch has {len(own)} answers and {len(other)} alternate ones: one for each is needed."
        )
    return found


def count_alternate_tokens(batch: Batch) -> Tensor:
    """Number of tokens of the alternate answers."""
    return count_tokens(alternate_of(batch))


def count_rows(batch: Batch) -> Tensor:
    """Number of sequences."""
    return torch.tensor(len(batch["input_ids"]))


COUNT = {
    "token": count_tokens,
    "sequence": count_sequences,
    "position": count_positions,
    "place": count_places,
    "label": count_labels,
    "row": count_rows,
    "alternate": count_alternate_tokens,
}


def token_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """−log p of every answer token, zero elsewhere; shape [batch, length − 1]."""
    flat = functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=IGNORE, reduction="none"
    )
    return flat.view(labels.shape[0], -1)


def sequence_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """log p(answer | question), summed over tokens; shape [batch]."""
    return -token_nll(logits, labels).sum(-1)


def answer_positions(batch: Batch) -> tuple[Tensor, Tensor]:
    """Rows and columns of the positions that predict an answer token; without :data:`POSITIONS` the host waits."""
    if POSITIONS in batch:
        return batch[POSITIONS].rows, batch[POSITIONS].columns
    rows, columns = answer_mask(batch["labels"]).nonzero(as_tuple=True)
    return rows, columns


#: Numbers per answer token from their logits, the tokens, and which of all answer tokens of the batch they are.
TokenReduction = Callable[[Tensor, Tensor, slice], Tensor]


def answer_values(
    model: nn.Module, batch: Batch, reduce: TokenReduction, context: LossContext | None = None
) -> tuple[Tensor, ...]:
    """For each number that ``reduce`` gives per answer token a matrix of shape [batch, length − 1], zero elsewhere.

    The logits of other positions are not computed (:mod:`rosu_llm.losses.answers`). With a ``context`` whose samples
    are bounded (``forget_until``) the gradients are weighted.
    """
    labels, (rows, columns) = batch["labels"], answer_positions(batch)
    tokens = labels[rows, columns + 1]
    gate = context.gate if context is not None and context.gate is not None and context.gate.covers(batch) else None

    def with_nll(logits: Tensor, at: slice) -> Tensor:
        values = reduce(logits, tokens[at], at)
        if gate is None:
            return values
        levels = nll_of(logits.detach(), tokens[at], at)
        return torch.cat([values if values.dim() > 1 else values.unsqueeze(1), levels.unsqueeze(1).to(values)], 1)

    reduction = TokenNLL(tokens) if reduce is nll_of else with_nll
    with nullcontext() if gate is None else gate.answering():
        known = (batch[POSITIONS].present, batch[POSITIONS].join) if POSITIONS in batch else ()
        values = at_positions(model, model_inputs(model, batch), rows, columns, reduction, *known)
    if gate is not None:
        levels = _spread(values[:, -1].detach(), labels, rows, columns)
        gate.weigh(values, levels, (rows, columns))
        values = values if reduce is nll_of else values[:, :-1]
    return tuple(_spread(column, labels, rows, columns) for column in values.unbind(1))


def _spread(values: Tensor, labels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    whole = values.new_zeros(labels.shape[0], labels.shape[1] - 1)
    return whole.index_put((rows, columns), values)


def nll_of(logits: Tensor, tokens: Tensor, at: slice) -> Tensor:
    """−log p of each token."""
    return functional.cross_entropy(logits, tokens, reduction="none")


def answer_nll(model: nn.Module, batch: Batch, context: LossContext | None = None) -> Tensor:
    """−log p of every answer token, zero elsewhere; shape [batch, length − 1]."""
    return answer_values(model, batch, nll_of, context)[0]


@register_loss("nll")
def nll(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Negative log-likelihood of the answer tokens."""
    return answer_nll(model, batch, context).sum()


@register_loss("kl", roles=("retain",), reference="distributions")
def kl(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """KL(initial ‖ current) of the next-token distributions at the answer positions.

    A retain loss only: at the initial weights its gradient vanishes, so raising it has no direction
    (and lowering it protects nothing until the first step has been taken).
    """
    return answer_values(model, batch, divergence_from_initial(batch, context), context)[0].sum()


def divergence_from_initial(batch: Batch, context: LossContext) -> TokenReduction:
    """KL(initial ‖ current) of each answer token."""
    initial = initial_logits(batch, context)

    def far(logits: Tensor, tokens: Tensor, at: slice) -> Tensor:
        reference, current = initial(at).log_softmax(-1), logits.log_softmax(-1)
        return functional.kl_div(current, reference, reduction="none", log_target=True).sum(-1)

    return far


@register_loss("divergence", roles=("forget",), reference="distributions")
def divergence(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """KL(initial ‖ current) raised on data to forget (SCRUB); at the initial weights it has no direction."""
    return answer_values(model, batch, divergence_from_initial(batch, context), context)[0].sum()


@register_loss(
    "divergence_and_task", roles=("retain",), reference="distributions", scrub_kl_weight=0.5, scrub_task_weight=1.0
)
def divergence_and_task(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """α KL(initial ‖ current) + γ NLL of the answer tokens, in one pass (SCRUB)."""
    far = divergence_from_initial(batch, context)
    alpha, gamma = context.options["scrub_kl_weight"], context.options["scrub_task_weight"]

    def both(logits: Tensor, tokens: Tensor, at: slice) -> Tensor:
        return alpha * far(logits, tokens, at) + gamma * nll_of(logits, tokens, at)

    return answer_values(model, batch, both, context)[0].sum()


@torch.no_grad()
def initial_logits(batch: Batch, context: LossContext) -> Callable[[slice], Tensor]:
    """The initial model's logits at some of the answer positions: of its hidden states chunk by chunk, or all kept.

    Under LoRA the initial model is this one without its adapter: ``forget_until`` must not take its pass for that of
    the current weights.
    """
    kept = context.reference_hidden(batch) if context.reference_hidden is not None else None
    if kept is not None:
        hidden, weight, bias = kept
        return lambda at: wide(functional.linear(hidden[at], weight, bias))
    assert context.reference_logits is not None
    with nullcontext() if context.gate is None else context.gate.answering():
        logits = context.reference_logits(batch)[answer_positions(batch)]
    return lambda at: logits[at]


@register_loss("npo", unit="sequence", roles=("forget",), reference="logprobs", npo_beta=0.1)
def npo(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Minus the NPO objective: (2/β) Σ log σ(−β log(π/π_ref)) over sequences."""
    assert context.reference_logprobs is not None
    beta = context.options["npo_beta"]
    present = answer_mask(batch["labels"]).any(-1)
    ratio = -answer_nll(model, batch, context).sum(-1) - context.reference_logprobs(batch)
    return (2.0 / beta) * (functional.logsigmoid(-beta * ratio) * present).sum()


@register_loss("simnpo", unit="sequence", roles=("forget",), simnpo_beta=4.5, simnpo_delta=0.0)
def simnpo(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Minus the SimNPO objective: (2/β) Σ log σ(β(ℓ − δ)) with ℓ the mean answer-token NLL of a sequence."""
    beta, delta = context.options["simnpo_beta"], context.options["simnpo_delta"]
    mask = answer_mask(batch["labels"])
    mean = answer_nll(model, batch, context).sum(-1) / mask.sum(-1).clamp(min=1)
    return (2.0 / beta) * (functional.logsigmoid(beta * (mean - delta)) * mask.any(-1)).sum()
