"""One rank of scripts/equivalence.py: run every case of every layout, honest or broken on purpose; keep the weights."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

HONEST = "-"
#: What a control breaks, and the layouts in which that is an error.
CONTROLS = {
    "no_restore": ("ddp", "fsdp2", "zero1", "zero2", "zero3"),  # the optimizer steps from w+δ
    "local_dots": ("fsdp2", "zero1", "zero2", "zero3"),  # scalars not summed over ranks
    "local_delta": ("ddp",),  # f and r not averaged over ranks; whole gradients make a local dot product right
}


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

    from rosu_llm.analysis.doctor.spread import SpreadModel, mean_over_ranks

    cpu, calls = torch.device("cpu"), list[int]()

    def mean(values: torch.Tensor) -> torch.Tensor:
        calls.append(values.numel() * values.element_size())
        return mean_over_ranks(cpu, values)

    spread = SpreadModel(layout, cpu, optimizer=optimizer, amplify=amplify, accumulation=accumulation, mean=mean)
    start, space = spread.weights(), spread.step.space
    original_sum = space._sum_over_shards

    def counted(values: torch.Tensor) -> torch.Tensor:
        if layout not in ("local", "ddp"):
            calls.append(values.numel() * values.element_size())
        return original_sum(values)

    space._sum_over_shards = counted  # type: ignore[method-assign]
    gathered: list[int] = []
    original_gathers = {name: getattr(dist, name) for name in ("all_gather", "all_gather_into_tensor")}

    def counted_gather(name: str, output: Any, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals["__name__"].startswith("rosu_llm"):  # not those of DeepSpeed's own step
            gathered.append(sum(t.numel() * t.element_size() for t in (output if name == "all_gather" else [output])))
        return original_gathers[name](output, *args, **kwargs)

    logs: dict[str, float] = {}
    calls.clear()
    for t in range(steps):
        for name in original_gathers:
            setattr(dist, name, functools.partial(counted_gather, name))
        try:
            logs = spread.take(t)
        finally:
            for name, original in original_gathers.items():
                setattr(dist, name, original)
    size = sum(getattr(p, "ds_numel", p.numel()) for p in spread.model.parameters()) * 4
    measured = {
        "copies": space.held_bytes() / size,
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
    if dist.get_world_size() != arguments.expect_world:
        raise SystemExit(f"{dist.get_world_size()} processes instead of {arguments.expect_world}")
    found = [result for layout in arguments.layouts for result in results(layout, arguments)]
    if dist.get_rank() == 0:
        torch.save(found, arguments.out)
    dist.barrier()
    os._exit(0)  # all is written; tearing down gloo's threads now and then aborts the process
