"""One line before the first step: how many passes a step costs and how much memory it will want."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..geometry import BaseRule

#: State tensors per parameter of the optimizers Trainer offers most often; others count as two.
_STATES = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "Adafactor": 0, "Lion": 1}


@dataclass(frozen=True)
class Preflight:
    """Passes and estimated bytes of one training step, activations not included.

    ``passes`` counts those over single retain samples too, which are shorter than the others.
    """

    passes: int
    trainable: int
    total: int
    weights: int
    gradients: int
    optimizer: int
    buffers: int
    reference: int

    @property
    def peak(self) -> int:
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.buffers + self.reference

    def peak_per_process(self, layout: str, processes: int) -> int:
        """The same for one of several processes, which share what the layout splits."""
        split = self.optimizer + self.buffers if layout in ("zero1", "zero2", "zero3", "fsdp2") else 0
        split += self.gradients if layout in ("zero2", "zero3", "fsdp2") else 0
        split += self.weights if layout in ("zero3", "fsdp2") else 0
        return self.peak - split + split // processes

    def line(self) -> str:
        """The sentence that is logged."""
        share = 100.0 * self.trainable / max(1, self.total)
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "captured gradients and backup": self.buffers,
            "reference model": self.reference,
        }
        listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
        return (
            f"{self.passes} forward+backward passes per step; {self.trainable:,} of {self.total:,} parameters "
            f"trainable ({share:.3g} %); estimated peak {_gib(self.peak)} without activations ({listed})"
        )


def preflight(
    model: nn.Module, rule: BaseRule, optimizer: torch.optim.Optimizer, reference_bytes: int = 0
) -> Preflight:
    """Estimate from the model and optimizer at hand."""
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    size = sum(_count(p) * p.element_size() for p in trained)
    kept = rule.samples + (len(rule.passes) if rule.perturbs else len(rule.passes) - 1)
    kept += int(rule.perturbs and rule.metric != "euclidean")  # D⁻¹q
    kept += int(rule.remembers is not None) + rule.stored
    adaptive = _STATES.get(type(optimizer).__name__, 2)
    if type(optimizer).__name__ == "SGD" and any(g.get("momentum") for g in optimizer.param_groups):
        adaptive = 1
    return Preflight(
        passes=rule.samples + len(rule.passes) + int(rule.perturbs),
        trainable=sum(_count(p) for p in trained),
        total=sum(_count(p) for p in parameters),
        weights=sum(_count(p) * p.element_size() for p in parameters),
        gradients=size,
        optimizer=adaptive * size,
        buffers=(kept + int(rule.perturbs)) * size,
        reference=reference_bytes,
    )


def _count(parameter: nn.Parameter) -> int:
    """Elements of a parameter, also while ZeRO-3 holds it in slices."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
