"""Evaluation of paired batches inside Trainer's own evaluation loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..losses import COUNT
from .config import MethodArguments
from .references import References
from .window import PARTS, WindowLoss

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object


class PairedEvaluation(Base):  # type: ignore[misc]
    """Losses of ``{"forget": …, "retain": …}`` batches; plain batches are left to Trainer."""

    method_args: MethodArguments
    _references: References
    _eval_parts: dict[str, list[float]]

    def window_loss(self, part: str) -> WindowLoss:
        raise NotImplementedError

    def mean_over_ranks(self, values: Tensor) -> Tensor:
        raise NotImplementedError

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Retain loss of a paired batch; Trainer's own loss of a plain one."""
        if not any(part in inputs for part in PARTS):
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        part = "retain" if "retain" in inputs else "forget"
        total, units = self._summed_loss(model, inputs[part], part)
        loss = total / units.clamp(min=1)
        return (loss, {}) if return_outputs else loss

    def _summed_loss(self, model: nn.Module, batch: Mapping[str, Any], part: str) -> tuple[Tensor, Tensor]:
        """The loss summed over its units, and their number."""
        window = self.window_loss(part)
        with self.compute_loss_context_manager():
            total = window.spec.function(model, batch, window.context)
        return total, COUNT[window.spec.unit](batch)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """For paired batches ``eval_loss`` is the retain loss; ``eval_forget_loss`` comes beside it."""
        if not any(part in inputs for part in PARTS):
            result: tuple[Tensor | None, Tensor | None, Tensor | None]
            result = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return result
        inputs = self._prepare_inputs(inputs)
        loss: Tensor | None = None
        with torch.no_grad():
            for part in PARTS:
                if part not in inputs:
                    continue
                sums = self._eval_parts.setdefault(part, [0.0, 0.0])
                if self._references.cover(model, inputs[part], part):
                    total, units = self._summed_loss(model, inputs[part], part)
                    sums[0] += float(total)
                    sums[1] += float(units)
                    loss = total.detach() / units.clamp(min=1)
        return loss, None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, with the losses of paired batches: sums over all of them, so that batch sizes do not matter."""
        self._eval_parts = {}
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        for part, sums in self._eval_parts.items():
            total, units = self.mean_over_ranks(torch.tensor(sums, dtype=torch.float64)).tolist()
            if units:
                alone = part == "retain" or "retain" not in self._eval_parts
                output.metrics[f"{prefix}_loss" if alone else f"{prefix}_{part}_loss"] = total / units
                if alone and part == "forget":
                    output.metrics[f"{prefix}_forget_loss"] = total / units
            elif part == "retain":
                output.metrics.pop(f"{prefix}_loss", None)  # Trainer's mean, here of the forget losses
        return output

    def floating_point_ops(self, inputs: Any) -> int:
        """Sum over the passes of a step."""
        if not isinstance(inputs, Mapping) or not any(part in inputs for part in PARTS):
            return int(super().floating_point_ops(inputs))
        rule = self.method_args.rule()
        times = {part: 1 + int(rule.perturbs and rule.surrogate == part) for part in PARTS}
        once = super().floating_point_ops
        return sum(times.get(part, 1) * int(once(inputs[part])) for part in rule.passes)
