"""From collected batches to the closures the step engine runs, normalised over the whole window.

``window_tokens``: L = (sum over the window's units) / (number of its units), counted per part and over
all ranks. ``micro_mean``: the mean of micro-batch means, as trainers that normalise per batch do.
Reductions are part of the algorithm here, because α = ρ/‖q‖ depends on the scale of the losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DataError
from ..losses import COUNT, LossContext, LossSpec, answer_nll
from ..losses.depth import GATE, returned
from ..losses.language import IGNORE
from ..losses.reference import evaluating
from ..step import Closure

PARTS = ("forget", "retain")


def check_batch(
    batch: Any,
    parts: Iterable[str] = PARTS,
    keys: Iterable[str] = ("input_ids", "labels"),
    own: Mapping[str, Iterable[str] | None] | None = None,
) -> None:
    """Raise one clear error for a batch the step cannot use; ``own`` are keys of single parts, in place of ``keys``."""
    if not isinstance(batch, Mapping):
        raise DataError(f"A batch must be a mapping {{'forget': …, 'retain': …}}, not {type(batch).__name__}.")
    for part in parts:
        if part not in batch:
            raise DataError(
                f"The batch has keys {sorted(map(str, batch))} but no {part!r}: build it with ForgetRetainDataset and "
                "ForgetRetainCollator, or return {'forget': {...}, 'retain': {...}} from your collator."
            )
        if not isinstance(batch[part], Mapping):
            raise DataError(f"batch[{part!r}] must hold input_ids and labels, not {type(batch[part]).__name__}.")
        for key in (own or {}).get(part) or keys:
            if key not in batch[part]:
                raise DataError(f"batch[{part!r}] has keys {sorted(map(str, batch[part]))} but no {key!r}.")


@dataclass(frozen=True)
class WindowLoss:
    """How one part's loss is computed and normalised.

    Attributes:
        spec: the loss.
        context: its references and options.
        reduction: ``window_tokens`` or ``micro_mean``.
        forward_context: entered around every forward (autocast).
        mean_over_ranks: averages a small tensor over processes.
        gated: raise samples no further than the gate of their batch lets (:mod:`rosu_llm.losses.depth`).
    """

    spec: LossSpec
    context: LossContext
    reduction: str
    forward_context: Callable[[], AbstractContextManager[Any]]
    mean_over_ranks: Callable[[Tensor], Tensor]
    gated: bool = False

    def closures(
        self,
        model: nn.Module,
        batches: Sequence[Mapping[str, Any]],
        part: str,
        count: int | None = None,
        *,
        required: bool = True,
    ) -> list[Closure]:
        """One closure per micro-batch. Their sum, averaged over ranks, is the window's loss.

        ``count`` is the length of the longest window over ranks: a shorter one repeats its last micro-batch with
        weight zero, so that all ranks take part in the same collectives. ``required``: a window in which no rank has
        anything that counts is an error; else it has no closures, on any rank.
        """
        units = COUNT[self.spec.unit]
        counts = [float(n) for n in torch.stack([units(batch) for batch in batches]).tolist()]  # the host waits once
        weights = self._weights(counts, part, required=required)
        if not weights:
            return []
        missing = max(0, (count or 0) - len(batches))
        padded = zip([*batches, *([batches[-1]] * missing)], [*weights, *([0.0] * missing)], strict=True)
        return [self.share(model, batch, weight) for batch, weight in padded]

    def streamed(
        self, model: nn.Module, batches: Sequence[Callable[[], Mapping[str, Any]]], part: str, count: int
    ) -> list[Closure]:
        """The same for batches that are too many to keep: each is made when its closure is called, and dropped."""
        units = COUNT[self.spec.unit]
        weights = self._weights([float(units(make())) for make in batches], part)
        missing = max(0, count - len(batches))
        padded = zip([*batches, *([batches[-1]] * missing)], [*weights, *([0.0] * missing)], strict=True)
        return [partial(self._late, model, make, weight) for make, weight in padded]

    def _late(self, model: nn.Module, make: Callable[[], Mapping[str, Any]], weight: float) -> Tensor:
        return self.share(model, make(), weight)()

    def _weights(self, counts: Sequence[float], part: str, *, required: bool = True) -> list[float]:
        """What the sum over each micro-batch is multiplied by, from the numbers of their units; or nothing."""
        mean = float(self.mean_over_ranks(torch.tensor([sum(counts)], dtype=torch.float64))[0])
        if mean == 0.0 and not required:
            return []
        if mean == 0.0:
            raise DataError(
                f"The {part} window has no answer token: every label is -100 (after the shift by one). "
                "Check label masking and max_length."
            )
        if self.reduction == "window_tokens":
            return [1.0 / mean] * len(counts)
        return [1.0 / (max(n, 1.0) * len(counts)) for n in counts]

    def share(self, model: nn.Module, batch: Mapping[str, Any], weight: float) -> Closure:
        """The batch's sum over its units, times ``weight``."""
        gate = batch[GATE] if self.gated else None
        context = replace(self.context, gate=gate)

        def closure() -> Tensor:
            with self.forward_context(), gate.on(model) if gate else nullcontext():
                return self.spec.function(model, batch, context) * weight

        return closure

    def returning(self) -> WindowLoss:
        """The loss of what is beyond its target in bounded batches of this one."""
        unit = "label" if self.spec.unit == "label" else "token"
        return replace(self, spec=LossSpec("returned", returned, unit, ("retain",)), gated=False)


def without_answers(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with nothing that counts."""
    return {**batch, "labels": torch.full_like(batch["labels"], IGNORE)}


@torch.no_grad()
def mean_nll(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    forward_context: Callable[[], AbstractContextManager[Any]],
    mean_over_ranks: Callable[[Tensor], Tensor],
) -> float:
    """Mean answer-token NLL over all batches and ranks, without dropout; NaN where there is no answer token.

    Args:
        forward_context: entered around every forward (autocast).
        mean_over_ranks: averages a small tensor over processes, so that replicas agree to the bit.
    """
    found: list[Tensor] = []
    with evaluating(model):
        for batch in batches:
            with forward_context():
                total = answer_nll(model, batch).double().sum()
            found.append(torch.stack([total, COUNT["token"](batch).to(total)]))
    sums = torch.stack(found).sum(0).cpu() if found else torch.zeros(2, dtype=torch.float64)
    summed, counted = mean_over_ranks(sums).tolist()
    return float(summed / counted) if counted else float("nan")
