"""The losses once more, one token at a time in Python floats, each sample alone and never padded."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, log1p
from typing import Any

import torch
from torch import Tensor, nn

Sample = dict[str, list[int]]


def rows(model: nn.Module, sample: Sample) -> list[tuple[list[float], int]]:
    """(logits, answer token) of every answer token of one sample."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([sample["input_ids"]])).logits[0].double().tolist()
    return [(logits[t - 1], label) for t, label in enumerate(sample["labels"]) if t > 0 and label != -100]


def log_softmax(logits: Sequence[float]) -> list[float]:
    """log p of every token."""
    top = max(logits)
    norm = top + log(sum(exp(x - top) for x in logits))
    return [x - norm for x in logits]


def token_losses(model: nn.Module, sample: Sample) -> list[float]:
    """−log p of every answer token."""
    return [-log_softmax(logits)[label] for logits, label in rows(model, sample)]


def logprob(model: nn.Module, sample: Sample) -> float:
    """log p(answer | question)."""
    return -sum(token_losses(model, sample))


def nll(model: nn.Module, batch: Sequence[Sample]) -> float:
    return sum(sum(token_losses(model, s)) for s in batch)


def kl(model: nn.Module, batch: Sequence[Sample], initial: nn.Module) -> float:
    total = 0.0
    for s in batch:
        for (before, _), (now, _) in zip(rows(initial, s), rows(model, s), strict=True):
            total += sum(exp(p) * (p - q) for p, q in zip(log_softmax(before), log_softmax(now), strict=True))
    return total


def log_sigmoid(x: float) -> float:
    return -log1p(exp(-x)) if x > -30.0 else x - log1p(exp(x))


def npo(model: nn.Module, batch: Sequence[Sample], initial: nn.Module, beta: float) -> float:
    answered = [s for s in batch if token_losses(model, s)]
    return sum(2.0 / beta * log_sigmoid(-beta * (logprob(model, s) - logprob(initial, s))) for s in answered)


def simnpo(model: nn.Module, batch: Sequence[Sample], beta: float, delta: float) -> float:
    losses = [token_losses(model, s) for s in batch]
    return sum(2.0 / beta * log_sigmoid(beta * (sum(x) / len(x) - delta)) for x in losses if x)


def padded(batch: Sequence[Sample], width: int, *, left: bool = False, pad: int = 0) -> dict[str, Tensor]:
    """A batch of the given width, filled up on either side."""
    columns: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for s in batch:
        ids, labels = s["input_ids"], s["labels"]
        gap = width - len(ids)
        for name, row, fill in (
            ("input_ids", ids, pad),
            ("attention_mask", [1] * len(ids), 0),
            ("labels", labels, -100),
        ):
            columns[name].append([fill] * gap + row if left else row + [fill] * gap)
    return {name: torch.tensor(value) for name, value in columns.items()}


def unanswered(ids: Sequence[int]) -> Sample:
    """A sample whose labels are all masked."""
    return {"input_ids": list(ids), "labels": [-100] * len(ids)}


def first_only(ids: Sequence[int]) -> Sample:
    """A sample whose only label is its first token, which nothing predicts."""
    return {"input_ids": list(ids), "labels": [ids[0]] + [-100] * (len(ids) - 1)}


def directional(value: Any, model: nn.Module, direction: Sequence[Tensor], step: float = 1e-5) -> float:
    """Central difference of ``value()`` along ``direction`` in parameter space."""
    ends = []
    parameters = list(model.parameters())
    for sign in (1.0, -2.0, 1.0):  # out, to the other side, back
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(d, alpha=sign * step)
        ends.append(value())
    return float(ends[0] - ends[1]) / (2.0 * step)


def dpo(
    model: nn.Module, batch: Sequence[Sample], alternates: Sequence[Sample], initial: nn.Module, beta: float
) -> float:
    total = 0.0
    for answer, other in zip(batch, alternates, strict=True):
        if token_losses(model, answer) and token_losses(model, other):
            margin = logprob(model, other) - logprob(initial, other) - logprob(model, answer) + logprob(initial, answer)
            total += 2.0 / beta * log_sigmoid(beta * margin)
    return total


def undial(model: nn.Module, batch: Sequence[Sample], initial: nn.Module, beta: float) -> float:
    total = 0.0
    for s in batch:
        for (before, token), (now, _) in zip(rows(initial, s), rows(model, s), strict=True):
            lowered = [x - beta * (v == token) for v, x in enumerate(before)]
            total += sum(exp(q) * p for q, p in zip(log_softmax(lowered), log_softmax(now), strict=True))
    return total


def weighted(model: nn.Module, batch: Sequence[Sample], weights: Sequence[float]) -> float:
    """Σ of the answer tokens' losses, each with the next of the weights."""
    losses = [x for s in batch for x in token_losses(model, s)]
    return sum(w * x for w, x in zip(weights, losses, strict=True))


def probabilities(model: nn.Module, batch: Sequence[Sample]) -> list[float]:
    """p of every answer token."""
    return [exp(-x) for s in batch for x in token_losses(model, s)]


def odds_against(p: float) -> float:
    """log((1 − p)/p); beyond p = .99 its tangent there, in −log p."""
    return log((1.0 - p) / p) if p <= 0.99 else log(0.01 / 0.99) + (log(0.99) - log(p)) / 0.01
