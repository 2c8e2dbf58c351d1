"""One process that accumulates two micro-batches under FSDP2, either way; rank 0 prints what it holds in between."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rosu_llm.space import FSDP2Space
from tests.distributed.leaving import leave
from tests.models import samples, tiny_llama


def held(model: torch.nn.Module) -> int:
    """Bytes of gradients this process holds: sharded ones, and whole ones not reduced yet."""
    total = sum(p.grad.to_local().nbytes for p in model.parameters() if p.grad is not None)
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):
            group = module._get_fsdp_state()._fsdp_param_group
            for parameter in group.fsdp_params if group is not None else []:
                whole = parameter.unsharded_accumulated_grad
                total += whole.nbytes if whole is not None else 0
                pending = getattr(parameter, "_unsharded_param", None)
                if pending is not None and pending.grad is not None:
                    total += pending.grad.nbytes
    return int(total)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = {}
    for unsharded in (False, True):
        model = tiny_llama()
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        space = FSDP2Space(model, model.parameters(), accumulate_unsharded=unsharded)
        space.begin()
        for i, sample in enumerate(samples(2, seed=5)):
            with space.micro_batch(last=i == 1):
                ids = torch.tensor([sample["input_ids"]])
                space.backward(model(input_ids=ids, labels=ids).loss)
            if i == 0:
                result["unsharded" if unsharded else "sharded"] = held(model) / size
    if dist.get_rank() == 0:
        print("HELD " + json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
