"""One process of several that diagnose the same model, spread in every way; started by torchrun.

    diagnosis_worker.py FOLDER LAYOUT…

Rank 0 writes FOLDER/LAYOUT.json: the diagnosis, and whether all weights are bit for bit what they were.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rosu_llm import measure_coupling
from tests.distributed.leaving import leave
from tests.models import samples, tiny_llama

#: Ragged on purpose: batches that two processes cannot share evenly, micro-batches that do not divide their share.
PLAN: dict[str, Any] = {
    "pairs": 3,
    "forget_batch_size": 3,
    "retain_batch_size": 7,
    "micro_batch_size": 2,
    "rhos": (0.2, 0.8),
    "points": 0,
    "full_batch": True,
    "progress": False,
}


def data() -> tuple[list[Any], list[Any]]:
    return samples(9, seed=1), samples(12, seed=2)


def spread(layout: str, model: Any) -> Any:
    """The model as this layout wraps it."""
    if layout == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if layout == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": int(layout[-1])},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def whole_weights(model: Any) -> dict[str, torch.Tensor]:
    import contextlib

    named = dict(model.named_parameters())
    gathered: Any = contextlib.nullcontext()
    if any(hasattr(p, "ds_id") for p in named.values()):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(named.values()))
    with gathered:
        whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in named.items()}
        return {name: p.detach().clone() for name, p in whole.items()}


def main() -> None:
    folder, layouts = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    if any(layout.startswith("zero") for layout in layouts):
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    else:
        dist.init_process_group("gloo")
    for layout in layouts:
        model = spread(layout, tiny_llama())
        before = whole_weights(model)
        found = measure_coupling(model, *data(), **PLAN)
        after = whole_weights(model)
        equal = all(torch.equal(after[name], before[name]) for name in before)
        if dist.get_rank() == 0:
            record = {**found.document, "world": dist.get_world_size(), "unchanged": equal}
            (folder / f"{layout}.json").write_text(json.dumps(record))
    leave()


if __name__ == "__main__":
    main()
