"""A tiny Llama that takes unlearning steps over the same global windows in whatever layout it is spread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...data.pairing import ForgetRetainCollator
from ...losses import COUNT, LossContext, get_loss
from ...space import select_space
from ...space.select import average_over_ranks
from ...step import UnlearningStep

#: Optimizer → learning rate.
RATES = {"sgd": 0.2, "adamw": 1e-3}
VOCABULARY, RHO = 61, 0.2

Mean = Callable[[Tensor], Tensor]


def tiny_model(seed: int = 0) -> Any:
    """A Llama whose parameter sizes are divisible by neither 2 nor 3 throughout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=40,
            intermediate_size=51,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def window(step: int, part: int, count: int) -> list[dict[str, list[int]]]:
    """The ragged samples of one part of a global window."""
    generator = torch.Generator().manual_seed(1000 * part + step)
    samples = []
    for _ in range(count):
        length = int(torch.randint(5, 13, (1,), generator=generator))
        ids = torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()
        samples.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return samples


def mean_over_ranks(device: torch.device, values: Tensor) -> Tensor:
    """The mean of a small tensor over processes; it travels on the device that their group can reach."""
    if not dist.is_initialized():
        return values
    moved = values.to(device, copy=True)
    average_over_ranks(moved)
    return moved.to(values.device)


class SpreadModel:
    """The model in one layout, with the step that trains it.

    Args:
        layout: ``local``, or with a process group ``ddp``, ``fsdp2``, ``zero1``, ``zero2`` or ``zero3``.
        device: of this process.
        samples: of each part of a global window; a multiple of processes × accumulation.
        mean: in place of the mean over processes, for those who count what it exchanges.
        zero: further settings of ``zero_optimization``.
    """

    def __init__(
        self,
        layout: str,
        device: torch.device,
        *,
        optimizer: str = "adamw",
        amplify: str = "matched",
        accumulation: int = 2,
        samples: int = 24,
        mean: Mean | None = None,
        zero: Mapping[str, Any] | None = None,
    ) -> None:
        self._layout, self._device, self._accumulation, self._samples = layout, device, accumulation, samples
        alone = layout == "local"
        self._rank, self._world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        self.model, rate = tiny_model().to(device), RATES[optimizer]
        # foreach=False: fused orders of summation are not what is compared here
        make = {
            "sgd": lambda parameters: torch.optim.SGD(parameters, lr=rate, foreach=False),
            "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01, foreach=False),
        }[optimizer]
        self.module: Any = self.model
        if layout.startswith("zero"):
            used = self._to_deepspeed(make, {"stage": int(layout[-1]), **(zero or {})})
        else:
            if layout == "fsdp2":
                self._shard()
            elif layout == "ddp":
                self.module = torch.nn.parallel.DistributedDataParallel(self.model)
            used = make(self.model.parameters())
        self.step = UnlearningStep(
            self.model,
            used,
            rho=RHO,
            amplify=amplify,
            space=select_space(self.module),
            mean_over_ranks=None if alone else mean or partial(mean_over_ranks, device),
        )

    def _shard(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self._device.type, (self._world,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def _to_deepspeed(self, make: Callable[[Any], Any], zero: Mapping[str, Any]) -> Any:
        import deepspeed

        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self._accumulation,
            "zero_optimization": dict(zero),
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        }
        self.module, *_ = deepspeed.initialize(model=self.model, optimizer=make(self.model.parameters()), config=config)
        return self.module.optimizer.optimizer

    def take(self, step: int) -> dict[str, float]:
        """Update number ``step``; what it would log."""
        collate, nll = ForgetRetainCollator(0), get_loss("nll", "retain").function
        closures: dict[str, list[Callable[[], Tensor]]] = {}
        for part, name in enumerate(("forget", "retain")):
            samples = window(step, part, self._samples)
            per_rank = sum(int(COUNT["token"](collate([sample]))) for sample in samples) / self._world
            mine = samples[self._rank :: self._world]
            size = len(mine) // self._accumulation

            def loss(batch: Any, units: float = per_rank) -> Tensor:
                return nll(self.module, batch, LossContext()) / units

            batches = [collate(mine[at * size : (at + 1) * size]) for at in range(self._accumulation)]
            closures[name] = [partial(loss, {k: v.to(self._device) for k, v in b.items()}) for b in batches]
        return self.step(closures["forget"], closures["retain"])

    def weights(self) -> Tensor:
        """All weights as one float64 vector on the CPU, on every process."""
        parameters = list(self.model.parameters())
        gathered: Any = contextlib.nullcontext()
        if self._layout == "zero3":
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters(parameters)
        with gathered:
            whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
            return torch.cat([p.detach().cpu().double().reshape(-1) for p in whole])
