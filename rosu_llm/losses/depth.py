"""Raise every forget sample only so far: bounded forgetting, for any loss.

The gradient of a sample is weighted by clip((T − ℓ)/margin, 0, 1): ℓ is the negative log-likelihood of its answer now,
per token (of an image: of its class), and T what it should become. What is as unlikely as data never seen is left
alone, and taken up again if it comes back. Single tokens may have a T each. Raising some of them drags the others of
their answer beyond theirs, so a token's weight may be multiplied by that of its whole answer (``whole``), and what is
beyond its T may be brought back: by the forget loss itself, where weights go down to −1 (``reverse``), or as part of
what is to be kept, weighted by clip((ℓ − T)/margin, 0, 1) (``return``, :func:`returned`). A method then sees it in its
retain loss: ROSU's perturbation is neutral to it as well.

The weight multiplies the gradient where it enters the logits, so every loss that reads them is bounded alike. It is
taken at the first pass of a step and stays through the others; no gradient goes through it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .answers import wide
from .classification import answer_levels
from .language import answer_mask, token_nll
from .registry import Batch, LossContext

#: T of every row, or of every position that predicts a token, for a batch.
Targets = Callable[[Batch], Tensor]
#: The key under which a batch of bounded samples holds its :class:`Gate`.
GATE = "gate"


def sample_nll(levels: Tensor, labels: Tensor) -> Tensor:
    """Mean −log p of each row's answer tokens, from those of all of them."""
    return levels.sum(-1) / answer_mask(labels).sum(-1).clamp(min=1)


class Depth:
    """How deep the forget samples are, and what weight that gives them.

    Args:
        targets: T per row (shape [batch]), or per predicting position (shape [batch, length − 1]).
        margin: distance from T at which a sample has its full weight.
        whole: with T per position, weigh every position by its whole row, too, where both are on the same side of T.
        beyond: what becomes of what is beyond T: ``leave``, ``reverse`` or ``return``. The last two weigh it below 0.
    """

    def __init__(self, targets: Targets, margin: float, *, whole: bool = False, beyond: str = "leave") -> None:
        self._targets, self._margin, self._whole = targets, margin, whole
        self._least = 0.0 if beyond == "leave" else -1.0
        self.reverses, self.returns = beyond == "reverse", beyond == "return"
        #: The mean weight of the first step with any, which a resumed run must know.
        self.start: float | None = None
        self._seen: list[Tensor] = []  # on their device until they are read

    def gate(self, batch: Batch) -> Gate:
        """The weights of one batch, for all passes of a step."""
        return Gate(self, batch)

    @torch.no_grad()
    def weigh(self, levels: Tensor, batch: Batch) -> Tensor:
        """The weight of every row or position, from −log p of every answer token; noted for the logs.

        Above 0 it is to be raised, below 0 lowered.
        """
        targets, now, counted = self._compared(levels, batch)
        weights = self._share(targets - now) * counted
        if self._whole:
            rows = sample_nll((targets - levels) * counted, batch["labels"])
            weights = weights * (self._share(rows)[:, None] * weights.sign()).clamp(min=0.0)
        up, down = weights.clamp(min=0.0), (-weights).clamp(min=0.0)
        found = (counted, up, counted & (weights <= 0.0), targets * counted, now * counted, down)
        self._seen.append(torch.stack([part.sum(dtype=_sum_dtype(now)) for part in found]))
        return weights

    def _share(self, left: Tensor) -> Tensor:
        return (left / self._margin).clamp(self._least, 1.0)

    @torch.no_grad()
    def distance(self, levels: Tensor, batch: Batch) -> tuple[float, float]:
        """Σ |T − ℓ| over the rows or positions that count, and their number."""
        targets, now, counted = self._compared(levels, batch)
        return float(((targets - now).abs() * counted).sum(dtype=_sum_dtype(now))), float(counted.sum())

    def _compared(self, levels: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """T, ℓ and whether they count, for every row or position."""
        mask = answer_mask(batch["labels"])
        targets = self._targets(batch).to(levels)
        if targets.dim() == 1:
            return targets, sample_nll(levels, batch["labels"]), mask.any(-1)
        return targets, levels, mask

    def _totals(self) -> Tensor:
        if not self._seen:
            return torch.zeros(6, dtype=torch.float64)
        return torch.stack(self._seen).cpu().double().sum(0)

    def remaining(self, mean_over_ranks: Callable[[Tensor], Tensor]) -> float:
        """How much is left to do: the mean weight of this step's batches over that of the first that had any.

        With ``reverse`` what is to be lowered is left, too. With ``return`` the square root, as the length of a sum of
        unrelated gradients falls.
        """
        count, raised, *_, lowered = mean_over_ranks(self._totals()).tolist()
        mean = float((raised + (lowered if self.reverses else 0.0)) / count) if count else 0.0
        if mean == 0.0:
            return 0.0
        if self.start is None:
            self.start = mean
        share = min(1.0, mean / self.start)
        return sqrt(share) if self.returns else share

    def logs(self, mean_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Means over what was weighed since the last call, over all processes."""
        count, weight, reached, target, loss, beyond = mean_over_ranks(self._totals()).tolist()
        self._seen = []
        if not count:
            return {}
        means = {"remaining": weight, "reached": reached, "target": target, "loss": loss}
        if self._least:
            means["beyond"] = beyond
        return {f"depth/{name}": value / count for name, value in means.items()}


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


class Gate:
    """The weights of one batch: measured at its first forward, applied at every one."""

    def __init__(self, depth: Depth, batch: Batch) -> None:
        self._depth, self._batch = depth, batch
        self._weights: Tensor | None = None
        self._answering = False

    def covers(self, batch: Batch) -> bool:
        """Whether these are its rows, and not alternate answers, say."""
        return batch["input_ids"] is self._batch["input_ids"]

    @contextlib.contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Weigh the gradient of every forward of this batch inside."""
        handle = model.register_forward_hook(self._after, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
        if self._weights is None:
            raise ConfigError(
                "forget_until bounds losses that call answer_nll(model, batch, context), or model(input_ids="
                "batch['input_ids'], …) and read .logits; this forget_loss did not. Set forget_until='off', or change "
                "the loss."
            )

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Inside, a forward is for somebody who calls :meth:`weigh` with what comes of it."""
        self._answering = True
        try:
            yield
        finally:
            self._answering = False

    def weights(self, levels: Tensor) -> Tensor:
        """Those of the first call, of every row or position: ``levels`` are −log p of every answer token then."""
        if self._weights is None:
            self._weights = self._depth.weigh(levels.detach(), self._batch)
        return self._weights

    def _raising(self, levels: Tensor) -> Tensor:
        """The weights in the forget loss."""
        weights = self.weights(levels)
        return weights if self._depth.reverses else weights.clamp(min=0.0)

    def weigh(self, values: Tensor, levels: Tensor, positions: tuple[Tensor, Tensor] | None = None) -> None:
        """Weigh the gradient of ``values``: numbers per answer token, at ``positions``, or of every row and position.

        ``levels`` holds −log p of every answer token, shape [batch, length − 1].
        """
        weights = self._raising(levels)
        if not values.requires_grad:
            return
        weights = weights if weights.dim() > 1 else weights[:, None].expand(levels.shape)
        if positions is not None:
            weights = weights[positions]
        elif weights.shape[1] < values.shape[1]:  # the last position predicts nothing
            weights = torch.nn.functional.pad(weights, (0, values.shape[1] - weights.shape[1]))

        def weighed(gradient: Tensor) -> Tensor:
            # Once: a Hessian product sends second derivatives the same way, and those are of the loss, not of w.
            handle.remove()
            return gradient * weights[..., None].to(gradient.dtype)

        handle = values.register_hook(weighed)

    def weigh_rows(self, values: Tensor, levels: Tensor) -> None:
        """Weigh the gradient of one number per row, for losses that compare whole answers; ``levels`` as above."""
        weights = self._raising(levels)
        if not values.requires_grad:
            return

        def weighed(gradient: Tensor) -> Tensor:
            handle.remove()  # once, as above
            return gradient * weights.to(gradient.dtype)

        handle = values.register_hook(weighed)

    def _after(self, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        """For losses that read the logits of text themselves."""
        ids = self._batch.get("input_ids")
        if self._answering or ids is None or named.get("input_ids") is not ids:
            return
        logits: Tensor = output.logits
        with torch.no_grad():
            levels = token_nll(wide(logits), self._batch["labels"])
        self.weigh(logits, levels)


def returned(model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
    """Σ w⁻ℓ of a batch with a gate: what is beyond its target, to be lowered as part of the retain loss."""
    gate: Gate = batch[GATE]
    levels = answer_levels(model, batch)
    weights = (-gate.weights(levels)).clamp(min=0.0).to(levels)
    return (levels * (weights if weights.dim() > 1 else weights[:, None])).sum()
