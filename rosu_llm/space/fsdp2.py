"""Weights sharded by FSDP2 (``fully_shard``): every process holds its slice of each parameter as a DTensor.

Inner products are taken over the local slices and summed by one small all-reduce; δ is added to the slices, and
the next forward gathers w+δ as it gathers any weights. Gradients arrive reduce-scattered, so captured gradients
and backup take 1/world of the memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UnsupportedLayoutError
from .base import ParameterSpace
from .local import trainable
from .preconditioner import Preconditioners, preconditioners_of


def is_dtensor(tensor: object) -> bool:
    """Whether a parameter is sharded as a DTensor."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def _local(tensor: Any) -> Tensor:
    result: Tensor = tensor.to_local()
    return result


class FSDP2Space(ParameterSpace):
    """Parameter space over the local shards of DTensor parameters.

    Args:
        model: the root module that ``fully_shard`` was applied to.
        parameters: the optimizer's.
        accumulate_unsharded: keep whole gradients on every process until the window's last micro-batch, which saves
            one reduce-scatter per micro-batch and costs a whole copy of the gradients. Off by default: that copy is
            what users of FSDP have no room for.
        compute_dtype: the type the forward rounds weights to (mixed-precision policy).
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        *,
        accumulate_unsharded: bool = False,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(compute_dtype)
        self.parameters = trainable(parameters)
        whole = [tuple(p.shape) for p in self.parameters if not is_dtensor(p)]
        if whole:
            raise UnsupportedLayoutError(
                f"{len(whole)} of {len(self.parameters)} trainable parameters are not sharded (first shape "
                f"{whole[0]}): apply fully_shard to the root module too, so that every parameter is a DTensor."
            )
        self._root: Any = model
        self._accumulate_unsharded = accumulate_unsharded
        self._group = _shard_group(self.parameters[0])
        self._sharded = [
            m for m in model.modules() if hasattr(m, "set_requires_gradient_sync") and hasattr(m, "reshard")
        ]

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self._root.set_requires_gradient_sync(last or not self._accumulate_unsharded)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        optimizer.step()
        return True

    def preconditioners(self, optimizer: torch.optim.Optimizer) -> Preconditioners | None:
        return preconditioners_of(optimizer, self.parameters)

    def owners(self) -> list[nn.Parameter | None]:
        return list(self.parameters)

    def _master(self) -> list[Tensor]:
        return [_local(p.data) for p in self.parameters]

    def _gradients(self) -> list[Tensor | None]:
        return [None if p.grad is None else _local(p.grad) for p in self.parameters]

    def _clear_gradients(self) -> None:
        for p in self.parameters:
            p.grad = None

    def _gradient_targets(self) -> list[Tensor | None]:
        for p, touched in zip(self.parameters, self._used, strict=True):
            if not touched:
                p.grad = None
            elif p.grad is None:
                p.grad = torch.zeros_like(p.detach())
        return self._gradients()

    def _sum_over_shards(self, values: Tensor) -> Tensor:
        return all_reduce_sum(values, self._group, _local(self.parameters[0].data).device)

    def _forward_weights_changed(self) -> None:
        super()._forward_weights_changed()
        self._reshard()

    def _gradient_written(self) -> None:
        # The optimizer is about to step: a forward since the last backward (calibration) may have left gathered copies.
        self._reshard()

    def _reshard(self) -> None:
        """Drop gathered copies, which a forward without backward leaves behind: the next forward would read them."""
        for module in self._sharded:
            module.reshard()  # type: ignore[operator]


def all_reduce_sum(values: Tensor, group: Any, device: torch.device) -> Tensor:
    """Sum a handful of float64 scalars over a process group; they travel on the device the group can reach."""
    moved = values.to(device)
    dist.all_reduce(moved, group=group)
    return moved.cpu()


def _shard_group(parameter: Any) -> Any:
    """The process group among which slices are distinct; replicas (HSDP) are left out."""
    dimensions = [i for i, placement in enumerate(parameter.placements) if placement.is_shard()]
    if len(dimensions) != 1:
        raise UnsupportedLayoutError(
            f"Parameters with placements {parameter.placements} are not supported: use one sharded mesh dimension "
            "(FSDP2 or HSDP), without tensor parallelism."
        )
    return parameter.device_mesh.get_group(dimensions[0])
