"""What a model thinks of a given answer: one forward pass, reduced at once to a few numbers per token.

The logits of a batch are samples × length × vocabulary, and most of them are of the question. Only the positions that
predict a token of the answer reach the output layer, they are reduced in float32 in small chunks, and what leaves the
device is, per answer token,

    log p(token),   whether the token is the first choice,   (log p(token) − μ) / σ

with μ and σ² the mean and variance of log p under the model's own distribution (Min-K%++, Zhang et al., 2024).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.chat_format import Encoded
from ...errors import NonFiniteError
from .packing import Packed, pack

#: Logits in float32 at once: 128 MB, which fills a GPU; on a CPU what stays in its cache is three times as fast.
CHUNK = {"cpu": 1 << 20}
DEFAULT_CHUNK = 1 << 25
MIN_VARIANCE = 1e-6  # OpenUnlearning's, for equal numbers
BROKEN = "The model's log-probabilities are not finite: its weights or its precision are broken."
LEAST = -1e4  # p is 0 long before; 0·∞ of a token that can never come would make the moments NaN

logger = logging.getLogger(__name__)

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

    def plain(self) -> list[list[float]]:
        """As lists, with every bit."""
        return [self.log_prob.tolist(), self.hit.tolist(), self.z.tolist()]

    @classmethod
    def from_plain(cls, lists: Sequence[Sequence[float]]) -> TokenStatistics:
        log_prob, hit, z = lists
        return cls(np.array(log_prob, np.float64), np.array(hit, np.bool_), np.array(z, np.float64))


@torch.inference_mode()
def token_statistics(
    model: Any, batch: Sequence[Encoded], pad: int, *, full: bool, share: bool = False
) -> list[TokenStatistics]:
    """The statistics of each sample's answer.

    Args:
        full: add what memorisation and attacks need.
        share: put neighbours with the same prompt into one row (:mod:`.packing`).
    """
    device = next(model.parameters()).device
    packed = pack(batch, pad, share=share, dtype=model.dtype)
    with _only(model, packed):
        output = model(**{name: value.to(device) for name, value in packed.inputs.items()}, use_cache=False)
    logits = output.logits
    if logits.shape[:2] != (1, len(packed.targets)):
        logits = logits[packed.rows.to(logits.device), packed.columns.to(logits.device)].unsqueeze(0)
    reduced = _reduce(logits[0], packed.targets.to(logits.device), full)
    parts: list[list[Any]] = [np.split(values, np.cumsum(packed.counts)[:-1]) for values in reduced]
    if not np.isfinite(reduced[0]).all():
        raise NonFiniteError(BROKEN)
    return [TokenStatistics(log_prob, hit, z) for log_prob, hit, z in zip(*parts, strict=True)]


def may_share(model: Any, answers: Sequence[Encoded], pad: int) -> bool:
    """Whether answers to one question may share a row, tried on these.

    Packed attention kernels take no mask for it, and where tokens also meet in a recurrent state no mask would help.
    """
    if getattr(model.config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return False

    def scores(share: bool) -> Numbers:
        found = token_statistics(model, answers, pad, full=False, share=share)
        return np.concatenate([each.log_prob for each in found])

    apart = scores(False)
    try:
        together = scores(True)
    except Exception as error:  # whatever a model says to a mask it does not know
        logger.debug("Answers to one question do not share a row: %s", error)
        return False
    return bool(np.abs(together - apart).mean() < torch.finfo(model.dtype).eps ** 0.5)


def _reduce(logits: Tensor, targets: Tensor, full: bool) -> tuple[Numbers, NDArray[np.bool_], Numbers]:
    log_prob, hit, z = [], [], []
    rows = max(1, CHUNK.get(logits.device.type, DEFAULT_CHUNK) // logits.shape[-1])
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
def _only(model: Any, packed: Packed) -> Iterator[None]:
    """Let only positions that predict an answer token into the output layer, as one row; it works number by number."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        yield
        return

    def choose(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        hidden = inputs[0]
        if hidden.shape[:2] != packed.inputs["input_ids"].shape:
            return None
        return (hidden[packed.rows.to(hidden.device), packed.columns.to(hidden.device)].unsqueeze(0), *inputs[1:])

    handle = head.register_forward_pre_hook(choose)
    try:
        yield
    finally:
        handle.remove()
