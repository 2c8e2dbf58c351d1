"""Weights under DeepSpeed ZeRO: optimizer state and float32 master weights are partitioned, in stage 3 all weights.

Each process works on its own partition of every vector and one small all-reduce sums the scalars. The master is
the truth: δ is added to it and rounded into the weights the forward reads, which stages 1 and 2 then gather again
(once for perturbing, once for restoring) and stage 3 gathers in the forward anyway. The combined gradient is put
where the engine's own clipping and optimizer step find it. The accumulation boundary is set here, so that one
window is one optimizer step whatever the engine counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UnsupportedLayoutError
from .base import ParameterSpace
from .fsdp2 import all_reduce_sum
from .preconditioner import Preconditioners, preconditioners_of, second_moment


class ZeroSpace(ParameterSpace):
    """What the stages share: the engine drives backward and step."""

    keeps_master = True

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine = engine
        self._optimizer = engine.optimizer
        self._group = engine.data_parallel_group

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        self._engine.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        # Not accelerator.backward, which would also step; and no division by the engine's accumulation count.
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.step()
        return bool(self._engine.was_step_applied())

    def hold(self, name: str) -> None:
        if self._loss_scale() != 1.0:  # the engine's buffers must keep their loss scale until they are overwritten
            self.capture(name)
        else:
            super().hold(name)

    def _loss_scale(self) -> float:
        return float(getattr(self._optimizer, "loss_scale", 1.0))

    def _sum_over_shards(self, values: Tensor) -> Tensor:
        return all_reduce_sum(values, self._group, self._master()[0].device)


class Zero12Space(ZeroSpace):
    """Stages 1 and 2: this process's flat partition of every parameter group, piece by piece.

    DeepSpeed lists the gradient of a partition as pieces of parameters; the same cuts, applied to the flat master and
    to the flat model weights, give aligned views without copying.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._rank = dist.get_rank(group=self._group)
        self._groups = range(len(self._optimizer.bit16_groups))
        self._sizes: list[list[int]] | None = None
        self._owners: list[nn.Parameter | None] = []

    def _pieces(self) -> list[list[Tensor]] | None:
        found = [self._optimizer.averaged_gradients.get(i) for i in self._groups]
        if any(pieces is None for pieces in found):
            return None
        return [[t.view(-1) for t in pieces] for pieces in found]

    def _cut(self, flat: list[Tensor]) -> list[Tensor]:
        if self._sizes is None:
            pieces = self._pieces()
            if pieces is None:
                return flat
            self._sizes = [[t.numel() for t in group] for group in pieces]
            self._owners = [owner for i in self._groups for owner in self._owners_of(i)]
        return [view for whole, sizes in zip(flat, self._sizes, strict=True) for view in whole.split(sizes)]

    def _owners_of(self, group: int) -> list[nn.Parameter | None]:
        # What is beyond the partition's parameters, or marked so in between, only fills it up.
        mine = iter(self._optimizer.params_in_partition[group])
        pieces = self._optimizer.averaged_gradients[group]
        return [None if getattr(piece, "_zero_padding", False) else next(mine, None) for piece in pieces]

    def owners(self) -> list[nn.Parameter | None]:
        return self._owners

    def _master(self) -> list[Tensor]:
        return self._cut(self.weights())

    def weights(self) -> list[Tensor]:
        # Uncut: where the cuts are is known after the first backward only.
        return [self._optimizer.single_partition_of_fp32_groups[i].data for i in self._groups]

    def preconditioners(self, optimizer: torch.optim.Optimizer) -> Preconditioners | None:
        flat = [self._optimizer.single_partition_of_fp32_groups[i] for i in self._groups]
        found = preconditioners_of(optimizer, flat)
        if found is None:
            return None
        whole = [known for known in found if known is not None]
        assert self._sizes is not None
        cuts = zip(whole, self._sizes, strict=True)
        return [replace(known, second=piece) for known, sizes in cuts for piece in known.second.split(sizes)]

    def _forward_weights(self) -> list[Tensor]:
        parts = self._optimizer.parallel_partitioned_bit16_groups
        return self._cut([parts[i][self._rank].data for i in self._groups])

    def _gradients(self) -> list[Tensor | None]:
        pieces = self._pieces()
        if pieces is None:
            return [None] * len(self._master())
        return [t for group in pieces for t in group]

    def _clear_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for store in (self._optimizer.averaged_gradients, getattr(self._optimizer, "all_grad_tensors", {})):
            for key in list(store):
                store[key] = None

    def _gradient_targets(self) -> list[Tensor | None]:
        if self._pieces() is None:
            assert self._sizes is not None
            for i, sizes in zip(self._groups, self._sizes, strict=True):
                like = self._optimizer.single_partition_of_fp32_groups[i]
                kind = getattr(self._optimizer, "gradient_accumulation_dtype", like.dtype)
                self._optimizer.averaged_gradients[i] = [torch.zeros(n, dtype=kind, device=like.device) for n in sizes]
        return self._gradients()

    def _forward_weights_changed(self) -> None:
        super()._forward_weights_changed()
        columns = zip(
            self._optimizer.bit16_groups_flat,
            self._optimizer.parallel_partitioned_bit16_groups,
            self._optimizer.real_dp_process_group,
            strict=True,
        )
        for flat, parts, group in columns:
            mine = parts[self._rank].data
            if _fills(flat, parts):  # every part into its place, this process's own stays where it is
                dist.all_gather_into_tensor(flat.data, mine, group=group)
            else:
                dist.all_gather([part.data for part in parts], mine.clone(), group=group)

    def _master_changed(self) -> None:
        for i in self._groups:
            master = self._optimizer.single_partition_of_fp32_groups[i]
            self._optimizer.parallel_partitioned_bit16_groups[i][self._rank].data.copy_(master.data)
        self._forward_weights_changed()


class Zero3Space(ZeroSpace):
    """Stage 3: this process's slice of every parameter, without the padding that evens slices out."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        # `parameters()` names a tied parameter once.
        self.parameters: list[Any] = [p for p in engine.module.parameters() if p.requires_grad]
        self._lengths = [_real_length(p) for p in self.parameters]
        self._persistent = [p for p in self.parameters if getattr(p, "ds_persist", False)]
        self._full_targets: list[Tensor] = []
        # DeepSpeed waits for a stream whenever it is asked where a tensor lies: it is asked once a step.
        self._known_master: list[Tensor] | None = None
        self._known_slices: list[Tensor] | None = None

    def begin(self) -> None:
        self._known_master = self._known_slices = None
        super().begin()

    def _trim(self, tensors: list[Tensor]) -> list[Tensor]:
        return [t.view(-1)[:n] for t, n in zip(tensors, self._lengths, strict=True)]

    def owners(self) -> list[nn.Parameter | None]:
        return list(self.parameters)

    def _master(self) -> list[Tensor]:
        from deepspeed.utils import safe_get_local_fp32_param

        if self._known_master is None:
            self._known_master = self._trim([safe_get_local_fp32_param(p).data for p in self.parameters])
        return self._known_master

    def preconditioners(self, optimizer: torch.optim.Optimizer) -> Preconditioners | None:
        from deepspeed.utils import safe_get_local_optimizer_state

        known = next((p for p in optimizer.state if optimizer.state[p]), None)
        found = None if known is None else preconditioners_of(optimizer, [known])
        if found is None:
            return None
        (like,) = found
        assert like is not None
        key = second_moment(optimizer.param_groups[0])
        return [
            replace(like, second=t)
            for t in self._trim([safe_get_local_optimizer_state(p, key) for p in self.parameters])
        ]

    def _forward_weights(self) -> list[Tensor]:
        return self._trim([p.ds_tensor.data for p in self.parameters])

    def _slices(self) -> list[Tensor]:
        """The gradient as DeepSpeed keeps it, or float32 copies of one that it keeps in another type."""
        from deepspeed.utils import safe_get_local_grad

        if self._known_slices is not None:
            return self._known_slices
        found = [safe_get_local_grad(p).data for p in self.parameters]
        if safe_get_local_grad(self.parameters[0]).data_ptr() == found[0].data_ptr():
            self._known_slices = found
        return found

    def _put(self, values: list[Tensor]) -> None:
        """Write :meth:`_slices` back, where they are copies."""
        from deepspeed.utils import safe_set_local_grad

        for p, value in zip(self.parameters, values, strict=True) if self._known_slices is None else ():
            safe_set_local_grad(p, value)

    def _gradients(self) -> list[Tensor | None]:
        return list(self._trim(self._slices()))

    def _clear_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        # A parameter that the next pass does not use would otherwise keep this pass's gradient. In place: after an
        # error there may be no memory left.
        self._put([held.zero_() for held in self._slices()])

    def _gradient_targets(self) -> list[Tensor | None]:
        self._full_targets = self._slices()
        return list(self._trim(self._full_targets))

    def _gradient_written(self) -> None:
        self._put(self._full_targets)
        self._full_targets = []

    def _forward_weights_changed(self) -> None:
        super()._forward_weights_changed()
        # Small parameters stay gathered between passes, and a forward may have left others so: drop those copies.
        gathered = [p for p in self.parameters if p.ds_status.name == "AVAILABLE"]
        for p in gathered:
            # A tied embedding is still marked as in use after backward (its input has no gradient to hook); no pass is
            # running here, and DeepSpeed clears the mark in the same way after its own step.
            p.ds_active_sub_modules.clear()
        if gathered:
            gathered[0].partition(gathered, has_been_updated=False)
        if self._persistent:
            self._persistent[0].all_gather(self._persistent)

    def _master_changed(self) -> None:
        for seen, true in zip(self._forward_weights(), self._master(), strict=True):
            seen.copy_(true)
        self._forward_weights_changed()


def _fills(flat: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether the parts are equal slices of the whole, in order and without gaps."""
    size = parts[0].numel() * flat.element_size()
    return flat.numel() == len(parts) * parts[0].numel() and all(
        part.numel() == parts[0].numel() and part.data_ptr() == flat.data_ptr() + i * size
        for i, part in enumerate(parts)
    )


def _real_length(parameter: Any) -> int:
    """Elements of this process's slice that belong to the parameter; the rest is padding."""
    size = int(parameter.ds_tensor.numel())
    rank = dist.get_rank(group=parameter.ds_process_group)
    return max(0, min(size, int(parameter.ds_numel) - rank * size))


def zero_space(engine: Any) -> ZeroSpace:
    """The space for an initialised DeepSpeed engine."""
    refuse_offload(engine.config)
    stage = engine.zero_optimization_stage()
    if stage in (1, 2):
        return Zero12Space(engine)
    if stage == 3:
        return Zero3Space(engine)
    raise UnsupportedLayoutError("DeepSpeed without ZeRO (stage 0) is not supported: use stage 1, or plain DDP.")


def refuse_offload(config: Any) -> None:
    """Refuse what this implementation cannot follow, from a DeepSpeed configuration dictionary."""
    zero = (config or {}).get("zero_optimization", {}) if isinstance(config, dict) else {}
    for key in ("offload_optimizer", "offload_param"):
        device = (zero.get(key) or {}).get("device", "none")
        if device not in ("none", None):
            raise UnsupportedLayoutError(
                f"zero_optimization.{key}.device={device!r} is not supported: weights or optimizer state would live "
                "where the step cannot perturb them. Remove it, or train an adapter (lora_r) to fit."
            )
    if int(zero.get("zero_hpz_partition_size", 1) or 1) > 1 or int(zero.get("mics_shard_size", -1) or -1) > 0:
        raise UnsupportedLayoutError("ZeRO++ secondary partitions (hpZ) and MiCS are not supported: use plain stage 3.")
