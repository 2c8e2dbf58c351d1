"""What a model thinks of a given answer: one forward pass per answer, reduced at once to a few numbers per token.

The logits of a batch are samples × length × vocabulary, and most of them are of the question. Only the positions that
predict a token of the answer reach the output layer, they are reduced in float32 in small chunks, and what leaves the
device is, per answer token,

    log p(token),   whether the token is the first choice,   (log p(token) − μ) / σ

with μ and σ² the mean and variance of log p under the model's own distribution (Min-K%++, Zhang et al., 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.chat_format import IGNORE, Encoded
from ...errors import NonFiniteError

CHUNK = 1 << 25  # logits in float32 at once: 128 MB
MIN_VARIANCE = 1e-6  # OpenUnlearning's, for equal numbers
LEAST = -1e4  # p is 0 long before; 0·∞ of a token that can never come would make the moments NaN

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class TokenStatistics:
    """Of one answer, a number per token, the closing end-of-text token included.

    Attributes:
        log_prob: log p(token).
        hit: whether the token is the model's first choice; with ``z`` only where asked for, else empty.
        z: (log p(token) − μ) / σ.
    """

    log_prob: Numbers
    hit: NDArray[np.bool_]
    z: Numbers


@torch.inference_mode()
def token_statistics(model: Any, batch: Sequence[Encoded], pad: int, *, full: bool) -> list[TokenStatistics]:
    """The statistics of each sample's answer; ``full`` adds what memorisation and attacks need."""
    device = next(model.parameters()).device
    ids, labels = _padded([s.input_ids for s in batch], pad), _padded([s.labels for s in batch], IGNORE)
    # Padding is told by the token, as in OpenUnlearning: where the padding token is the end-of-text token, those
    # inside a prompt are hidden from attention as well, and the numbers depend on it.
    mask = ids != pad
    predicts = torch.zeros_like(mask)
    predicts[:, :-1] = labels[:, 1:] != IGNORE
    targets = labels[:, 1:][predicts[:, :-1]].to(device)
    with _only(model, predicts.to(device)):
        output = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
    logits = output.logits
    logits = logits[0] if logits.shape[:2] == (1, len(targets)) else logits[predicts.to(logits.device)]
    reduced = _reduce(logits, targets.to(logits.device), full)
    counts = predicts.sum(-1).tolist()
    parts: list[list[Any]] = [np.split(values, np.cumsum(counts)[:-1]) for values in reduced]
    if not np.isfinite(reduced[0]).all():
        raise NonFiniteError("The model's log-probabilities are not finite: its weights or its precision are broken.")
    return [TokenStatistics(log_prob, hit, z) for log_prob, hit, z in zip(*parts, strict=True)]


def _reduce(logits: Tensor, targets: Tensor, full: bool) -> tuple[Numbers, NDArray[np.bool_], Numbers]:
    log_prob, hit, z = [], [], []
    rows = max(1, CHUNK // logits.shape[-1])
    for piece, target in zip(logits.split(rows), targets.split(rows), strict=True):
        logs = torch.log_softmax(piece.float(), -1)
        chosen = logs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        log_prob.append(chosen)
        if full:
            logs.clamp_(min=LEAST)
            weighted = logs.exp().mul_(logs)
            mean = weighted.sum(-1)
            variance = weighted.mul_(logs).sum(-1) - mean.square()
            hit.append(logs.argmax(-1) == target)
            z.append((chosen - mean) / variance.clamp(min=MIN_VARIANCE).sqrt())
    empty = targets.new_zeros(0)
    numbers = [torch.cat(values or [empty]).cpu().numpy() for values in (log_prob, hit, z)]
    return numbers[0].astype(np.float64), numbers[1].astype(np.bool_), numbers[2].astype(np.float64)


@contextmanager
def _only(model: Any, wanted: Tensor) -> Iterator[None]:
    """Let only the wanted positions into the output layer, as one row; what follows it works number by number."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        yield
        return

    def choose(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        hidden = inputs[0]
        if hidden.shape[:2] != wanted.shape:
            return None
        return (hidden[wanted.to(hidden.device)].unsqueeze(0), *inputs[1:])

    handle = head.register_forward_pre_hook(choose)
    try:
        yield
    finally:
        handle.remove()


def _padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])
