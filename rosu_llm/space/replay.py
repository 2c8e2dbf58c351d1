"""Make the pass at w+δ see what the pass at w saw: the same dropout masks, the same statistics.

Without it ``s − r`` would mostly measure dropout noise, and BatchNorm would average in activations
of weights that are never kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RandomState:
    """State of torch's generators on the CPU and on the given devices."""

    cpu: Tensor
    devices: dict[torch.device, Tensor]

    @staticmethod
    def now(devices: Iterable[torch.device] = ()) -> RandomState:
        """The current state."""
        others = {d for d in devices if d.type not in ("cpu", "meta")}
        return RandomState(torch.get_rng_state(), {d: _module(d).get_rng_state(d) for d in others})

    def restore(self) -> None:
        """Go back to this state."""
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            _module(device).set_rng_state(state, device)


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type)


@contextlib.contextmanager
def frozen_statistics(module: nn.Module | None) -> Iterator[None]:
    """Running statistics of BatchNorm layers come out as they went in."""
    layers = [] if module is None else [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    saved = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers()]
    try:
        yield
    finally:
        for buffer, value in saved:
            buffer.copy_(value)
