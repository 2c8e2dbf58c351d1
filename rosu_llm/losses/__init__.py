"""Losses as plain functions in a registry."""

from . import classification, distillation, language, preference, weighted
from .language import COUNT, answer_mask, answer_nll, answer_values, logits_of, sequence_logprobs, token_nll
from .reference import ReferenceLogProbs, ReferenceModel
from .registry import LOSSES, LossContext, LossSpec, get_loss, register_loss

__all__ = [
    "COUNT",
    "LOSSES",
    "LossContext",
    "LossSpec",
    "ReferenceLogProbs",
    "ReferenceModel",
    "answer_mask",
    "answer_nll",
    "answer_values",
    "classification",
    "distillation",
    "get_loss",
    "language",
    "logits_of",
    "preference",
    "register_loss",
    "sequence_logprobs",
    "token_nll",
    "weighted",
]
