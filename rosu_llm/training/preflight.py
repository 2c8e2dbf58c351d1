"""One line before the first step: how many passes a step costs and how much memory it will want."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..geometry import BaseRule
from ..geometry.methods.others.ssd import SSD

#: State tensors per parameter of the optimizers Trainer offers most often; others count as two.
_STATES = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "Lion": 1}


@dataclass(frozen=True)
class Preflight:
    """Passes and estimated bytes of one training step, activations not included.

    Attributes:
        passes: those over single retain samples too, which are shorter than the others.
        returning: passes over forget samples beyond their level, which join the retain data's (``forget_beyond``).
        single: a pass goes over one sample, so that a step has as many as its window has samples.
        refreshes: one pass over the whole retain data every so many steps comes on top; 0: none.
        trainable, total: numbers of parameters.
        buffers: captured gradients and backup, where the model is.
        host: the same where they are kept in host memory instead.
        backup: what of them DeepSpeed's master of the weights makes unnecessary.
        bf16: the model computes in bf16; DeepSpeed then holds weights and gradients in it, beside a float32 master.
    """

    passes: int
    trainable: int
    total: int
    weights: int
    gradients: int
    optimizer: int
    buffers: int
    reference: int
    refreshes: int = 0
    host: int = 0
    backup: int = 0
    bf16: bool = False
    single: bool = False
    returning: int = 0

    @property
    def work(self) -> str:
        """The passes, in words."""
        if self.single:
            return "one forward+backward pass per sample of either set"
        return f"{self.passes + self.returning} forward+backward passes per step"

    @property
    def peak(self) -> int:
        """Sum of all parts on the device."""
        return self.weights + self.gradients + self.optimizer + self.buffers + self.reference

    def of_process(self, layout: str, processes: int) -> Preflight:
        """The same for one of several processes, which share what the layout splits.

        DeepSpeed's optimizer owns a float32 master of the trained weights, split in every stage; what the model
        computes with is a second copy.
        """

        def split(size: int, *layouts: str) -> int:
            return -(-size // processes) if layout in layouts else size

        sharded = ("zero1", "zero2", "zero3", "fsdp2")
        weights, gradients, master = self.weights, self.gradients, 0
        buffers, host = self.buffers, self.host
        if layout.startswith("zero"):
            master = split(4 * self.trainable, *sharded)
            buffers, host = (max(0, size - self.backup) for size in (buffers, host))
            if self.bf16:
                weights, gradients = 2 * self.total, 2 * self.trainable
        return replace(
            self,
            weights=split(weights, "zero3", "fsdp2") + master,
            gradients=split(gradients, "zero2", "zero3", "fsdp2"),
            optimizer=split(self.optimizer, *sharded),
            buffers=split(buffers, *sharded),
            host=split(host, *sharded),
        )

    def peak_per_process(self, layout: str, processes: int) -> int:
        """Sum of all parts on the device of one of several processes."""
        return self.of_process(layout, processes).peak

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
        every = f"every {self.refreshes} steps" if self.refreshes > 1 else "every step"
        whole = f", and one over all retain data {every}" if self.refreshes else ""
        host = f"; captured gradients and backup {_gib(self.host)} in host memory" if self.host else ""
        return (
            f"{self.work}{whole}; {self.trainable:,} of {self.total:,} parameters trainable ({share:.3g} %); "
            f"estimated peak {_gib(self.peak)} without activations ({listed}){host}"
        )


def preflight(
    model: nn.Module,
    rule: BaseRule,
    optimizer: torch.optim.Optimizer,
    reference_bytes: int = 0,
    *,
    capture_bytes: int | None = None,
    on_host: bool = False,
    pulls: bool = True,
    returns: bool = False,
    bf16: bool = False,
) -> Preflight:
    """Estimate from the model and optimizer at hand.

    Args:
        reference_bytes: of what is kept of the initial model.
        capture_bytes: per element of a captured gradient; as many as the weight has unless given. The backup is as
            wide as the weights, which are restored bit for bit.
        on_host: captured gradients and backup are in host memory.
        pulls: a method that pulls does so after the optimizer's step, whose length is then measured from the backup.
        returns: forget samples beyond their level are part of what is kept.
        bf16: the model computes in bf16.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    size = sum(_count(p) * p.element_size() for p in trained)
    captured = size if capture_bytes is None else sum(_count(p) * min(capture_bytes, p.element_size()) for p in trained)
    kept = rule.samples + (len(rule.passes) if rule.perturbs else len(rule.passes) - 1)
    kept += int(rule.perturbs and rule.metric != "euclidean")  # D⁻¹q
    kept += int(rule.refreshes > 0) + rule.stored
    if rule.alternates:
        kept = 0
    if rule.sweeps:  # two sums of squares
        kept = 2
    wide = int(rule.perturbs) + int(rule.remembers is not None)  # the backup, and an average, which bf16 would stop
    buffers = kept * captured + wide * size
    return Preflight(
        passes=1 if rule.alternates else rule.samples + len(rule.passes) + int(rule.perturbs),
        trainable=sum(_count(p) for p in trained),
        total=sum(_count(p) for p in parameters),
        weights=sum(_count(p) * p.element_size() for p in parameters),
        gradients=size,
        optimizer=0 if rule.sweeps else _states(optimizer, trained),
        buffers=0 if on_host else buffers,
        reference=reference_bytes,
        refreshes=rule.refreshes,
        host=buffers if on_host else 0,
        backup=size if rule.perturbs and not (rule.pulls and pulls) else 0,
        bf16=bf16,
        single=isinstance(rule, SSD) and rule.fisher == "sample",
        returning=(1 + int(rule.perturbs and rule.surrogate == "retain")) if returns else 0,
    )


def capture_options(settings: Any) -> dict[str, Any]:
    """What of the method's settings decides how much is kept, as :func:`preflight` takes it."""
    return {
        "pulls": getattr(settings, "amplify", "auto") != "optimizer",
        "capture_bytes": 2 if getattr(settings, "capture_dtype", "float32") == "bfloat16" else None,
        "on_host": getattr(settings, "capture_device", "model") == "cpu",
        "returns": getattr(settings, "forget_beyond", "leave") == "return",
    }


def _states(optimizer: torch.optim.Optimizer, trained: Sequence[nn.Parameter]) -> int:
    """Bytes of the optimizer's state; what has 8-bit states is counted as if they were as wide as the weights."""
    kind, options = type(optimizer).__name__, optimizer.defaults
    if kind == "Adafactor":
        return sum(_factors(p, first_moment=options.get("beta1") is not None) * p.element_size() for p in trained)
    count = _STATES.get(kind, 2)
    if kind == "SGD" and any(g.get("momentum") for g in optimizer.param_groups):
        count = 1
    return count * sum(_count(p) * p.element_size() for p in trained)


def _factors(parameter: nn.Parameter, *, first_moment: bool) -> int:
    """Elements of Adafactor's state: a matrix's second moment is kept as row and column sums."""
    count, shape = _count(parameter), getattr(parameter, "ds_shape", parameter.shape)
    second = count // shape[-1] + count // shape[-2] if len(shape) >= 2 else count
    return second + (count if first_moment else 0)


def _count(parameter: nn.Parameter) -> int:
    """Elements of a parameter, also while ZeRO-3 holds it in slices."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
