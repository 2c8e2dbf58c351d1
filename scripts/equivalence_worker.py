"""One rank of scripts/equivalence.py: run every case of every layout, honest or broken on purpose; keep the weights."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

OPTIMIZERS = {"sgd": 0.2, "adamw": 1e-3}
WINDOW, VOCABULARY, RHO = 24, 61, 0.2

HONEST = "-"
#: What a control breaks, and the layouts in which that is an error.
CONTROLS = {
    "no_restore": ("ddp", "fsdp2", "zero1", "zero2", "zero3"),  # the optimizer steps from w+δ
    "local_dots": ("fsdp2", "zero1", "zero2", "zero3"),  # scalars not summed over ranks
    "local_delta": ("ddp",),  # f and r not averaged over ranks; whole gradients make a local dot product right
}


def build(seed: int = 0) -> Any:
    """A Llama whose parameter sizes are divisible by neither 2 nor 3 throughout."""
    import torch
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


def window(step: int, part: int) -> list[dict[str, list[int]]]:
    """The ragged samples of one global window."""
    import torch

    generator = torch.Generator().manual_seed(1000 * part + step)
    samples = []
    for _ in range(WINDOW):
        length = int(torch.randint(5, 13, (1,), generator=generator))
        ids = torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()
        samples.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return samples


class Layout:
    """A wrapped model, its optimizer and its parameter space."""

    def __init__(self, name: str, optimizer: str, accumulation: int) -> None:
        import torch

        model = build()
        rate = OPTIMIZERS[optimizer]
        # foreach=False: fused orders of summation are not what is compared here
        make = {
            "sgd": lambda ps: torch.optim.SGD(ps, lr=rate, foreach=False),
            "adamw": lambda ps: torch.optim.AdamW(ps, lr=rate, weight_decay=0.01, foreach=False),
        }[optimizer]
        self.name, self.space = name, None
        if name.startswith("zero"):
            self._deepspeed(model, make, int(name[-1]), accumulation)
        elif name == "fsdp2":
            self._fsdp2(model, make)
        elif name == "ddp":
            self.module = torch.nn.parallel.DistributedDataParallel(model)
            self.optimizer = make(model.parameters())
            from rosu_llm.space import LocalSpace

            self.space = LocalSpace(model.parameters(), no_sync=self.module.no_sync)
        else:
            self.module, self.optimizer = model, make(model.parameters())
        self.model = model

    def _fsdp2(self, model: Any, make: Any) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from rosu_llm.space import FSDP2Space

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.module, self.optimizer = model, make(model.parameters())
        self.space = FSDP2Space(model, model.parameters())

    def _deepspeed(self, model: Any, make: Any, stage: int, accumulation: int) -> None:
        import deepspeed

        from rosu_llm.space import zero_space

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=make(model.parameters()), config=config)
        self.module, self.optimizer = engine, engine.optimizer.optimizer
        self.space = zero_space(engine)

    def weights(self) -> Any:
        """All weights as one float64 vector, on every rank."""
        import torch

        parameters = list(self.model.parameters())
        gathered: Any = contextlib.nullcontext()
        if self.name == "zero3":
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters(parameters)
        with gathered:
            whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
            return torch.cat([p.detach().double().reshape(-1).clone() for p in whole])


@contextlib.contextmanager
def sabotage(kind: str) -> Iterator[None]:
    """Break one thing on purpose; see ``CONTROLS``."""
    from rosu_llm.space import FSDP2Space, LocalSpace, ParameterSpace
    from rosu_llm.space.zero import ZeroSpace

    @contextlib.contextmanager
    def leaky(self: Any, delta: Any, *, precise: bool = False, seed: int = 0) -> Iterator[Any]:
        truth = self._master()
        self._backup = [w.clone() for w in truth]
        realized = self._displace(delta, precise, seed, [])
        self._forward_weights_changed()
        yield realized
        for true, seen in zip(truth, self._forward_weights(), strict=True):
            true.copy_(seen)

    def alone(self: Any, *, last: bool) -> Any:
        return contextlib.nullcontext() if last and self.is_perturbed else self._no_sync()

    broken: dict[str, list[tuple[Any, str, Any]]] = {
        HONEST: [],
        "no_restore": [(ParameterSpace, "perturbed", leaky)],
        "local_dots": [(cls, "_sum_over_shards", lambda self, values: values) for cls in (FSDP2Space, ZeroSpace)],
        "local_delta": [(LocalSpace, "micro_batch", alone)],
    }
    saved = [(cls, name, cls.__dict__[name]) for cls, name, _ in broken[kind]]
    for cls, name, replacement in broken[kind]:
        setattr(cls, name, replacement)
    try:
        yield
    finally:
        for cls, name, original in saved:
            setattr(cls, name, original)


def run_case(layout: str, optimizer: str, amplify: str, accumulation: int, steps: int) -> tuple[Any, dict[str, Any]]:
    """Final weights and measurements of one case on this rank."""
    import torch
    import torch.distributed as dist

    from rosu_llm import ForgetRetainCollator, UnlearningStep
    from rosu_llm.losses import COUNT, LossContext, get_loss

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    calls: list[int] = []

    def mean(values: torch.Tensor) -> torch.Tensor:
        if world > 1:
            dist.all_reduce(values)
            calls.append(values.numel() * values.element_size())
        return values / world

    spread = Layout(layout, optimizer, accumulation)
    start = spread.weights()
    step = UnlearningStep(
        spread.model, spread.optimizer, rho=RHO, amplify=amplify, space=spread.space, mean_over_ranks=mean
    )
    original_sum = step.space._sum_over_shards

    def counted(values: torch.Tensor) -> torch.Tensor:
        if layout not in ("local", "ddp"):
            calls.append(values.numel() * values.element_size())
        return original_sum(values)

    step.space._sum_over_shards = counted  # type: ignore[method-assign]
    gathered: list[int] = []
    original_gather = dist.all_gather

    def counted_gather(outputs: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        gathered.append(sum(t.numel() * t.element_size() for t in outputs))
        return original_gather(outputs, *args, **kwargs)

    collate, nll = ForgetRetainCollator(0), get_loss("nll", "retain").function
    logs: dict[str, float] = {}
    calls.clear()
    for t in range(steps):
        closures: dict[str, list[Any]] = {}
        for part, name in enumerate(("forget", "retain")):
            samples = window(t, part)
            size = WINDOW // world // accumulation
            mine = samples[rank::world]
            per_rank = sum(int(COUNT["token"](collate([s]))) for s in samples) / world
            batches = [collate(mine[i * size : (i + 1) * size]) for i in range(accumulation)]
            closures[name] = [lambda b=b, n=per_rank: nll(spread.module, b, LossContext()) / n for b in batches]
        dist.all_gather = counted_gather
        try:
            logs = step(closures["forget"], closures["retain"])
        finally:
            dist.all_gather = original_gather
    size = sum(getattr(p, "ds_numel", p.numel()) for p in spread.model.parameters()) * 4
    measured = {
        "copies": step.space.held_bytes() / size,
        "scalar_bytes": sum(calls) / steps,
        "gathered": sum(gathered) / steps / size,
        "loss": logs["loss/retain"],
        "pull": logs.get("step/amplification_ratio", 0.0),
    }
    end = spread.weights()
    measured["moved"] = float((end - start).norm())
    return end, measured


def cases(layout: str, arguments: argparse.Namespace) -> list[tuple[str, str, str, int]]:
    """What is broken × optimizer × amplification × accumulation."""
    kinds = [HONEST]
    if arguments.controls:
        kinds += [kind for kind, layouts in CONTROLS.items() if layout in layouts]
    return list(itertools.product(kinds, arguments.optimizers, arguments.amplify, arguments.accumulations))


def results(layout: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The cases of a layout on this rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    found = []
    for kind, optimizer, amplify, accumulation in cases(layout, arguments):
        with sabotage(kind):
            weights, measured = run_case(layout, optimizer, amplify, accumulation, arguments.steps)
        agree = True
        if dist.is_initialized():
            everyone = [torch.zeros_like(weights) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, weights)
            agree = all(torch.equal(w, weights) for w in everyone)
        case = {"layout": layout, "sabotage": kind, "case": [optimizer, amplify, accumulation]}
        found.append({**case, "weights": weights, "replicas_equal": agree, **measured})
    return found


def worker(arguments: argparse.Namespace) -> None:
    """Run all layouts; rank 0 writes the results."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if any(layout.startswith("zero") for layout in arguments.layouts):
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    if dist.get_world_size() != arguments.expect_world:
        raise SystemExit(f"{dist.get_world_size()} processes instead of {arguments.expect_world}")
    found = [result for layout in arguments.layouts for result in results(layout, arguments)]
    if dist.get_rank() == 0:
        torch.save(found, arguments.out)
    dist.barrier()
    os._exit(0)  # all is written; tearing down gloo's threads now and then aborts the process
