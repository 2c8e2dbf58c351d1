"""Which parameter space fits a model, told by how it is wrapped: the only place that chooses one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .base import ParameterSpace
from .fsdp2 import FSDP2Space, is_dtensor
from .local import LocalSpace, ReplicaSpace
from .zero import zero_space


def select_space(
    model: Any,
    parameters: Iterable[nn.Parameter] | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    compute_dtype: torch.dtype | None = None,
    bypasses_wrapper: bool = False,
) -> ParameterSpace:
    """The space of ``parameters`` (the model's, unless given).

    Args:
        model: plain, wrapped in DDP, sharded by FSDP2's ``fully_shard``, or a DeepSpeed ZeRO engine.
        scaler: the loss scaler of fp16 training.
        compute_dtype: the type the forward pass rounds weights to (autocast).
        bypasses_wrapper: passes run parts of the model on their own, so that DDP averages no gradient.
    """
    if hasattr(model, "zero_optimization_stage"):
        return zero_space(model)
    chosen = list(model.parameters() if parameters is None else parameters)
    if any(is_dtensor(p) for p in chosen):
        return FSDP2Space(model, chosen, compute_dtype=compute_dtype)
    if not is_replicated(model):
        return LocalSpace(chosen, scaler=scaler, compute_dtype=compute_dtype)
    agree = partial(of_first_rank, chosen[0].device)
    if bypasses_wrapper:
        return ReplicaSpace(chosen, average=average_over_ranks, agree=agree, scaler=scaler, compute_dtype=compute_dtype)
    return LocalSpace(
        chosen,
        no_sync=model.no_sync,
        sync=lambda: _synchronised(model),
        average=average_over_ranks,
        agree=agree,
        scaler=scaler,
        compute_dtype=compute_dtype,
    )


@contextlib.contextmanager
def _synchronised(model: Any) -> Iterator[None]:
    """Let DDP average gradients, also where Trainer has told it not to (see ``ROSUMixin._steps_next``)."""
    wrapper = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    before, wrapper.require_backward_grad_sync = wrapper.require_backward_grad_sync, True
    try:
        yield
    finally:
        wrapper.require_backward_grad_sync = before


def is_replicated(model: Any) -> bool:
    """Whether the model is wrapped in DDP, also where the wrapper is compiled."""
    return callable(getattr(model, "no_sync", None))


def layout_name(model: Any) -> str:
    """``local``, ``ddp``, ``fsdp2`` or ``zero``, by how the model is wrapped."""
    if hasattr(model, "zero_optimization_stage"):
        return "zero"
    if any(is_dtensor(p) for p in model.parameters()):
        return "fsdp2"
    return "ddp" if is_replicated(model) else "local"


def average_over_ranks(tensor: Tensor) -> None:
    """Replace a tensor by its mean over processes."""
    torch.distributed.all_reduce(tensor)
    tensor.div_(torch.distributed.get_world_size())


def of_first_rank(device: torch.device, values: Tensor) -> Tensor:
    """The first process's values; they travel on the device that its process group can reach."""
    moved = values.to(device)
    torch.distributed.broadcast(moved, src=0)
    return moved.cpu()
