"""How likely a model finds given answers: one forward pass, reduced on the device to a few numbers per token.

Only positions that predict an answer token reach the output layer (:mod:`rosu_llm.losses.answers`), and their logits
are reduced in float32, chunk by chunk, to

    log p(token),   whether the token is the first choice,   (log p(token) − μ) / σ

per answer token, with μ and σ² the mean and variance of log p under the model's own distribution (Min-K%++, Zhang et
al., 2024). The figures of an answer follow from them by OpenUnlearning's definitions: the loss counts every token, the
closing end-of-text token included; the other figures leave out the last token, and n counts the rest.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.chat_format import Encoded
from ...errors import NonFiniteError
from ...losses.answers import at_positions
from .packing import pack

MIN_VARIANCE = 1e-6  # OpenUnlearning's, for equal numbers
BROKEN = "The model's log-probabilities are not finite: its weights or its precision are broken."
SHARE = 0.4  # the K of Min-K%
LEAST = -1e4  # exp(LEAST) is 0 already; with log p = −∞ the moments would be 0·∞ = NaN

logger = logging.getLogger(__name__)

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class TokenStatistics:
    """Numbers per token of one answer, the closing end-of-text token included."""

    log_prob: Numbers
    hit: NDArray[np.bool_]  # whether the token is the model's first choice; empty, like z, unless asked for
    z: Numbers  # (log p(token) − μ) / σ

    def plain(self) -> list[list[float]]:
        """As lists, with every bit."""
        return [self.log_prob.tolist(), self.hit.tolist(), self.z.tolist()]

    @classmethod
    def from_plain(cls, lists: Sequence[Sequence[float]]) -> TokenStatistics:
        log_prob, hit, z = lists
        return cls(np.array(log_prob, np.float64), np.array(hit, np.bool_), np.array(z, np.float64))

    def average_loss(self) -> float:
        """−mean log p(token)."""
        return float(-self.log_prob.mean())

    def probability(self) -> float:
        """p(answer)^(1/length) = exp(−loss)."""
        return float(np.exp(-self.average_loss()))

    def exact_memorization(self) -> float | None:
        """Share of tokens that are the model's first choice; none when the answer has none."""
        hits = self.hit[:-1]
        return float(hits.mean()) if len(hits) else None

    def extraction_strength(self) -> float:
        """1 − k/n, k the shortest prefix after which every first choice is right.

        OpenUnlearning tries k = 0 … n−1, so that an answer with a wrong last token gets 1/n, not 0.
        """
        hits = self.hit[:-1]
        if not len(hits):
            return 0.0
        wrong = np.flatnonzero(~hits)
        prefix = min(int(wrong[-1]) + 1, len(hits) - 1) if len(wrong) else 0
        return 1 - prefix / len(hits)

    def zlib_loss(self, text: str) -> float:
        """Loss per byte of the compressed answer."""
        return self.average_loss() / len(zlib.compress(text.encode("utf-8")))

    def min_k(self) -> float:
        """−mean of the lowest 40 % of log p(token)."""
        return _lowest(self.log_prob[:-1])

    def min_k_plus_plus(self) -> float:
        """The same of log p(token) standardised under the model's own distribution."""
        return _lowest(self.z[:-1])


def _lowest(values: Numbers) -> float:
    if not len(values):
        return 0.0
    return float(-np.sort(values)[: max(1, int(len(values) * SHARE))].mean())


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
    inputs = {name: value.to(device) for name, value in packed.inputs.items()}
    rows, columns, targets = (each.to(device) for each in (packed.rows, packed.columns, packed.targets))
    found = at_positions(
        model, {**inputs, "use_cache": False}, rows, columns, lambda logits, at: _numbers(logits, targets[at], full)
    )
    reduced = _apart(found.cpu().numpy(), full)
    parts: list[list[Any]] = [np.split(values, np.cumsum(packed.counts)[:-1]) for values in reduced]
    if not np.isfinite(reduced[0]).all():
        raise NonFiniteError(BROKEN)
    return [TokenStatistics(log_prob, hit, z) for log_prob, hit, z in zip(*parts, strict=True)]


def may_share(model: Any, answers: Sequence[Encoded], pad: int) -> bool:
    """Whether answers to one question may share a row: these answers are scored both ways and compared.

    Packed attention kernels take no such mask, and in models with a recurrent state no mask separates the answers.
    """
    if getattr(model.config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return False

    def scores(share: bool) -> Numbers:
        found = token_statistics(model, answers, pad, full=False, share=share)
        return np.concatenate([each.log_prob for each in found])

    apart = scores(False)
    try:
        together = scores(True)
    except Exception as error:  # models raise different errors for a mask they do not support
        logger.debug("Answers to one question do not share a row: %s", error)
        return False
    return bool(np.abs(together - apart).mean() < torch.finfo(model.dtype).eps ** 0.5)


def _numbers(logits: Tensor, targets: Tensor, full: bool) -> Tensor:
    """log p of each target and, in full, whether it is the first choice, and z."""
    logs = torch.log_softmax(logits, -1)
    chosen = logs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if not full:
        return chosen
    logs.clamp_(min=LEAST)
    weighted = logs.exp().mul_(logs)
    mean = weighted.sum(-1)
    variance = weighted.mul_(logs).sum(-1) - mean.square()
    hit = logs.argmax(-1) == targets
    return torch.stack([chosen, hit.to(chosen), (chosen - mean) / variance.clamp(min=MIN_VARIANCE).sqrt()], 1)


def _apart(found: NDArray[Any], full: bool) -> tuple[Numbers, NDArray[np.bool_], Numbers]:
    nothing = found[:0, 0]
    log_prob, hit, z = (found[:, 0], found[:, 1], found[:, 2]) if full else (found[:, 0], nothing, nothing)
    return log_prob.astype(np.float64), hit.astype(np.bool_), z.astype(np.float64)
