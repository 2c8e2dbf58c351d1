"""One process of a bf16 ZeRO run with a float32 master; rank 0 prints the log of its last step as JSON."""

from __future__ import annotations

import json
import sys

import deepspeed
import torch
import torch.distributed as dist

from rosu_llm import ForgetRetainCollator, UnlearningStep
from rosu_llm.losses import COUNT, LossContext, get_loss
from rosu_llm.space import zero_space
from tests.distributed.leaving import leave
from tests.models import samples, tiny_llama


def mean(values: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(values)
    return values / dist.get_world_size()


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = tiny_llama()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": int(sys.argv[1])},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    step = UnlearningStep(
        model, engine.optimizer.optimizer, rho=float(sys.argv[2]), space=zero_space(engine), mean_over_ranks=mean
    )
    collate, nll = ForgetRetainCollator(0), get_loss("nll", "retain").function
    rank = dist.get_rank()
    logs = {}
    for t in range(3):
        parts = [collate(samples(2, seed=100 * t + 10 * rank + part)) for part in (0, 1)]
        logs = step(*(lambda b=b: nll(engine, b, LossContext()) / COUNT["token"](b) for b in parts))
    if rank == 0:
        print("LOGS " + json.dumps(logs))
    leave()


if __name__ == "__main__":
    main()
