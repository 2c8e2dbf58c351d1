"""Losses of a causal language model on its answer tokens (labels ≠ −100)."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from .registry import Batch, LossContext, register_loss

IGNORE = -100

#: What a model is given whose forward takes any name; of others, what it names.
MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds")


def model_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """What of a batch the model's forward takes; labels stay out so that it computes no loss of its own."""
    kind: Any = type(_unwrapped(model))
    taken = _taken(kind)
    return {name: value for name, value in batch.items() if name in taken}


def _unwrapped(model: Any) -> Any:
    """The model inside DDP, DeepSpeed's engine, torch.compile and PEFT, whose own forward takes anything."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif type(model).__name__ in ("DistributedDataParallel", "DeepSpeedEngine"):
            model = model.module
        else:
            return model


@lru_cache(maxsize=64)
def _taken(kind: Any) -> frozenset[str]:
    parameters = inspect.signature(kind.forward).parameters
    free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return frozenset({*parameters, *(MODEL_INPUTS if free else ())} - {"self", "labels"})


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Logits in at least float32."""
    logits: Tensor = model(**model_inputs(model, batch)).logits
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def answer_mask(labels: Tensor) -> Tensor:
    """Which of the shifted positions predict an answer token."""
    return labels[:, 1:] != IGNORE


def count_tokens(batch: Batch) -> Tensor:
    """Number of answer tokens."""
    return answer_mask(batch["labels"]).sum()


def count_sequences(batch: Batch) -> Tensor:
    """Number of sequences with at least one answer token."""
    return answer_mask(batch["labels"]).any(-1).sum()


def count_positions(batch: Batch) -> Tensor:
    """Number of attended tokens."""
    mask: Tensor | None = batch.get("attention_mask")
    return count_places(batch) if mask is None else mask.bool().sum()


def count_places(batch: Batch) -> Tensor:
    """Number of tokens, padding included."""
    return torch.tensor(batch["input_ids"].numel())


def count_rows(batch: Batch) -> Tensor:
    """Number of sequences."""
    return torch.tensor(len(batch["input_ids"]))


COUNT = {
    "token": count_tokens,
    "sequence": count_sequences,
    "position": count_positions,
    "place": count_places,
    "row": count_rows,
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


@register_loss("nll")
def nll(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Negative log-likelihood of the answer tokens."""
    return token_nll(logits_of(model, batch), batch["labels"]).sum()


@register_loss("kl", roles=("retain",), reference="logits")
def kl(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """KL(initial ‖ current) of the next-token distributions at the answer positions.

    A retain loss only: at the initial weights its gradient vanishes, so raising it has no direction
    (and lowering it protects nothing until the first step has been taken).
    """
    assert context.reference_logits is not None
    keep = answer_mask(batch["labels"])
    current = logits_of(model, batch)[:, :-1][keep].log_softmax(-1)
    with torch.no_grad():
        initial = context.reference_logits(batch)[:, :-1][keep].log_softmax(-1)
    return functional.kl_div(current, initial, reduction="sum", log_target=True)


@register_loss("npo", unit="sequence", roles=("forget",), reference="logprobs", npo_beta=0.1)
def npo(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Minus the NPO objective: (2/β) Σ log σ(−β log(π/π_ref)) over sequences."""
    assert context.reference_logprobs is not None
    beta = context.options["npo_beta"]
    present = answer_mask(batch["labels"]).any(-1)
    ratio = sequence_logprobs(logits_of(model, batch), batch["labels"]) - context.reference_logprobs(batch)
    return (2.0 / beta) * (functional.logsigmoid(-beta * ratio) * present).sum()


@register_loss("simnpo", unit="sequence", roles=("forget",), simnpo_beta=4.5, simnpo_delta=0.0)
def simnpo(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Minus the SimNPO objective: (2/β) Σ log σ(β(ℓ − δ)) with ℓ the mean answer-token NLL of a sequence."""
    beta, delta = context.options["simnpo_beta"], context.options["simnpo_delta"]
    mask = answer_mask(batch["labels"])
    mean = token_nll(logits_of(model, batch), batch["labels"]).sum(-1) / mask.sum(-1).clamp(min=1)
    return (2.0 / beta) * (functional.logsigmoid(beta * (mean - delta)) * mask.any(-1)).sum()
