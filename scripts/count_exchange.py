"""What the processes of each layout exchange in a step: counted on two of them, beside the formulas of --estimate.

A tiny Llama takes a ROSU step on gloo over loopback while every collective that PyTorch dispatches is counted, DDP's
own among them. Printed are the bytes of whole tensors in units of the weights. Small parameters of ZeRO-3 are not kept
gathered here, as they are by default: in a large model they are few.

    python scripts/count_exchange.py
    python scripts/count_exchange.py --smoke --json FILE        # each layout once
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

WORLD = 2
#: ZeRO-3 as a large model sees it: nothing stays gathered between its uses.
SPLIT = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
#: What the dispatcher calls a collective → kind, and which of its tensors is the whole one.
KINDS = {"allreduce_": "reduced", "_allgather_base_": "gathered", "_reduce_scatter_base_": "scattered"}


def cases(smoke: bool) -> list[tuple[str, int, bool]]:
    """Layout, micro-batches of a pass, gradient checkpointing; ZeRO-3 last, for it changes how models are built."""
    zero = importlib.util.find_spec("deepspeed") is not None
    names = ["ddp", "fsdp2", *(["zero1", "zero2", "zero3"] if zero else [])]
    found = [(name, count, False) for name in names for count in ((2,) if smoke else (1, 2))]
    again = [] if smoke else [(name, 1, True) for name in ("fsdp2", "zero3") if name in names]
    return sorted([*found, *again], key=lambda case: names.index(case[0]))


def counted(layout: str, micro_batches: int, checkpointing: bool) -> dict[str, Any]:
    """Collectives and bytes of one step on this process, and what the formulas say."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from rosu_llm.analysis.doctor.spread import SpreadModel, tiny_model
    from rosu_llm.geometry import build_rule
    from rosu_llm.recipes.activations import pass_shape
    from rosu_llm.recipes.spreading import StepShape, traffic
    from rosu_llm.training.preflight import preflight

    calls: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    scalars = 0

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal scalars
            if operation.namespace == "c10d":
                tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
                whole = max(t.numel() * t.element_size() for t in tensors)
                kind = KINDS.get(operation._schema.name.removeprefix("c10d::"), "")
                if kind and whole > 128:  # the smallest parameter has 160 bytes
                    calls[kind] += 1
                    sizes[kind] += whole
                else:
                    scalars += whole
            return operation(*args, **(kwargs or {}))

    split = SPLIT if layout == "zero3" else None
    spread = SpreadModel(layout, torch.device("cpu"), accumulation=micro_batches, samples=4 * WORLD, zero=split)
    if checkpointing:
        spread.model.gradient_checkpointing_enable({"use_reentrant": False})
        spread.model.train()
    spread.take(0)
    with Listening():
        spread.take(1)

    model = tiny_model() if layout != "zero3" else spread.model
    count = {name: int(getattr(p, "ds_numel", p.numel())) for name, p in model.named_parameters()}
    layer = sum(size for name, size in count.items() if ".layers.0." in name)
    tied = count["model.embed_tokens.weight"]
    memory = preflight(model, build_rule("rosu"), torch.optim.AdamW(model.parameters()))
    step = StepShape(
        memory,
        pass_shape(model.config, layers=None, tokens=1, checkpointing=checkpointing),
        micro_batches=micro_batches,
        layer=layer,
        outside=sum(count.values()) - model.config.num_hidden_layers * layer,
        tied=tied,
    )
    said = traffic(step, layout)
    whole = 4 * sum(count.values())
    return {
        "layout": layout,
        "micro_batches": micro_batches,
        "checkpointing": checkpointing,
        "calls": sum(calls.values()),
        "scalars": scalars,
        "counted": {kind: sizes[kind] / whole for kind in KINDS.values()},
        "formula": {kind: getattr(said, kind) / whole for kind in KINDS.values()},
    }


def worker(smoke: bool, out: str) -> None:
    """One process: every case; the first writes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_world_size() != WORLD:
        raise SystemExit(f"{dist.get_world_size()} processes were started instead of {WORLD}.")
    rows = [counted(*case) for case in cases(smoke)]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # tearing down gloo's threads now and then aborts a process that has done everything


def launch(smoke: bool) -> list[dict[str, Any]]:
    """Start the processes; what they counted."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(WORLD)]
        command += [__file__, "--worker", str(out), *(["--smoke"] if smoke else [])]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            raise SystemExit(f"{WORLD} processes failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
        return found


def table(rows: list[dict[str, Any]]) -> str:
    """Counted and, in brackets, by the formula."""
    names = {"ddp": "DDP", "fsdp2": "FSDP2", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
    headings = ("layout", "micro-batches", "collectives", "all-reduced", "gathered", "scattered")
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "---:|" * (len(headings) - 1)]
    for row in rows:
        name = names[row["layout"]] + (", checkpointing" if row["checkpointing"] else "")
        pairs = [(row["counted"][kind], row["formula"][kind]) for kind in KINDS.values()]
        cells = [f"{found:.2f} ({said:.2f})" if found or said else "–" for found, said in pairs]
        lines.append(f"| {name} | {row['micro_batches']} | {row['calls']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="each layout once, two micro-batches a pass")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.smoke, arguments.worker)
    rows = launch(arguments.smoke)
    print(table(rows))
    print(f"\nScalars: at most {max(row['scalars'] for row in rows):.0f} bytes a step.")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
