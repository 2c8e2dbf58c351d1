"""The same weights however they are spread: one process against DDP, FSDP2 and DeepSpeed ZeRO-1/2/3.

A tiny Llama takes several steps over the same global windows in every layout, on gloo over loopback. Printed for
each: ‖w − w_ref‖/‖w_ref − w₀‖ against one process (accumulation 1), the memory of captured buffers per rank in units
of the trainable parameters, and what a step exchanges beyond the layout's own three backward passes and optimizer
step: bytes of scalars, and weights gathered again in units of the parameters. Negative controls break one thing on
purpose and must fail the same check.

    python scripts/equivalence.py                                  # everything, 2 and 3 processes
    python scripts/equivalence.py --layouts ddp fsdp2 --worlds 2 --smoke
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAYOUTS = ("local", "ddp", "fsdp2", "zero1", "zero2", "zero3")
OPTIMIZERS = {"sgd": 0.2, "adamw": 1e-3}
AMPLIFY = ("direct", "optimizer", "matched")
LIMIT = {"sgd": 1e-6, "adamw": 1e-4}
WINDOW, STEPS, VOCABULARY, RHO = 24, 5, 61, 0.2


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
def sabotage(kind: str | None) -> Iterator[None]:
    """Break one thing on purpose: ``local_dots`` (scalars not summed over ranks) or ``no_restore``."""
    from rosu_llm.space import FSDP2Space, TensorSpace
    from rosu_llm.space.zero import ZeroSpace

    saved = [(cls, "_sum", cls.__dict__["_sum"]) for cls in (FSDP2Space, ZeroSpace)]
    saved.append((TensorSpace, "perturbed", TensorSpace.__dict__["perturbed"]))
    if kind == "local_dots":
        for cls, name, _ in saved[:2]:
            setattr(cls, name, lambda self, values: values)
    elif kind == "no_restore":

        @contextlib.contextmanager
        def leaky(self: Any, delta: Any, *, precise: bool = False, seed: int = 0) -> Iterator[Any]:
            truth = self._truth()
            self._backup = [w.clone() for w in truth]
            realized = self._displace(delta, precise, seed, [])
            self._published()
            yield realized
            for true, seen in zip(truth, self._visible(), strict=True):
                true.copy_(seen)

        TensorSpace.perturbed = leaky  # type: ignore[method-assign]
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
    original_sum = step.space._sum

    def counted(values: torch.Tensor) -> torch.Tensor:
        if layout not in ("local", "ddp"):
            calls.append(values.numel() * values.element_size())
        return original_sum(values)

    step.space._sum = counted  # type: ignore[method-assign]
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


def worker(arguments: argparse.Namespace) -> None:
    """One rank: run every case of a layout and let rank 0 write the results."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    layout = arguments.worker
    if layout != "local":
        if layout.startswith("zero"):
            import deepspeed

            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        else:
            dist.init_process_group("gloo")
        if dist.get_world_size() != arguments.expect_world:
            raise SystemExit(f"{dist.get_world_size()} processes instead of {arguments.expect_world}")
    results = []
    for optimizer, amplify, accumulation in cases(arguments):
        with sabotage(arguments.sabotage):
            weights, measured = run_case(layout, optimizer, amplify, accumulation, arguments.steps)
        agree = True
        if dist.is_initialized():
            everyone = [torch.zeros_like(weights) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, weights)
            agree = all(torch.equal(w, weights) for w in everyone)
        results.append(
            {"case": [optimizer, amplify, accumulation], "weights": weights, "replicas_equal": agree, **measured}
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(results, arguments.out)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def cases(arguments: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Optimizer × amplification × accumulation."""
    return list(itertools.product(arguments.optimizers, arguments.amplify, arguments.accumulations))


def launch(layout: str, world: int, arguments: argparse.Namespace, broken: str | None = None) -> list[dict[str, Any]]:
    """Run the worker processes of one layout; their results."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.pt"
        command = [sys.executable]
        if layout != "local":
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
        command += [__file__, "--worker", layout, "--expect-world", str(world), "--out", str(out)]
        command += ["--steps", str(arguments.steps), "--accumulations", *map(str, arguments.accumulations)]
        command += ["--optimizers", *arguments.optimizers, "--amplify", *arguments.amplify]
        if broken:
            command += ["--sabotage", broken]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=arguments.timeout)
        if done.returncode != 0:
            raise SystemExit(f"{layout}×{world} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        results: list[dict[str, Any]] = torch.load(out, weights_only=True)
        return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS[1:]), choices=LAYOUTS[1:])
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--accumulations", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--amplify", nargs="+", default=list(AMPLIFY), choices=list(AMPLIFY))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--controls", action="store_true", help="also run the negative controls")
    parser.add_argument("--smoke", action="store_true", help="two steps, one amplification mode")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one layout")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    for hidden in ("--worker", "--out", "--sabotage"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--expect-world", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return 0
    if arguments.smoke:
        arguments.steps, arguments.amplify = 2, ["matched"]

    from rich.console import Console
    from rich.table import Table

    reference = {tuple(r["case"]): r for r in launch("local", 1, arguments)}
    table = Table(title=f"Difference to one process after {arguments.steps} steps: ‖w − w_ref‖/‖w_ref − w₀‖")
    for column in ("layout", "optimizer", "amplify", "acc.", "difference", "copies/rank", "scalar bytes", "gathers"):
        table.add_column(column)
    rows, failed = [], 0
    plans = [(layout, world, None) for layout in arguments.layouts for world in arguments.worlds]
    if arguments.controls:
        plans += [(layout, arguments.worlds[0], "no_restore") for layout in arguments.layouts]
        sharded = [layout for layout in arguments.layouts if layout != "ddp"]
        plans += [(layout, arguments.worlds[0], "local_dots") for layout in sharded]
    for layout, world, broken in plans:
        for result in launch(layout, world, arguments, broken):
            optimizer, amplify, accumulation = result["case"]
            truth = reference[optimizer, amplify, min(arguments.accumulations)]
            difference = float((result["weights"] - truth["weights"]).norm()) / truth["moved"]
            good = difference <= LIMIT[optimizer] and result["replicas_equal"]
            good = good if broken is None else difference > LIMIT[optimizer]
            failed += not good
            name = f"{layout}×{world}" + (f", {broken}" if broken else "")
            style = None if good else "bold red"
            table.add_row(
                name, optimizer, amplify, str(accumulation), f"{difference:.1e}", f"{result['copies']:.2f}",
                f"{result['scalar_bytes']:.0f}", f"{result['gathered']:.2f}", style=style,
            )  # fmt: skip
            rows.append(
                {
                    "layout": layout,
                    "world": world,
                    "sabotage": broken,
                    "optimizer": optimizer,
                    "amplify": amplify,
                    "accumulation": accumulation,
                    "difference": difference,
                    "replicas_equal": result["replicas_equal"],
                    "copies_per_rank": result["copies"],
                    "scalar_bytes_per_step": result["scalar_bytes"],
                    "gathered_copies_per_step": result["gathered"],
                    "good": good,
                }
            )
    Console().print(table)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(f"{len(rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
