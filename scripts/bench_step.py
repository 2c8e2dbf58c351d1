"""What the step costs beyond its three passes: time as a ratio, memory in parameter copies.

Time: one whole ROSU step (three passes, vector algebra, AdamW, pull) over three plain forward+backward passes on
the same batches, alternating in one process, fastest over fastest (noise only ever adds), in CPU seconds of one thread;
beside it the same with AdamW's step counted on both sides, which is what the vector algebra alone costs. Memory: peak
resident size of a process that takes ROSU steps minus that of one that takes plain AdamW steps on the same
batches, over the bytes of the trainable parameters.

    python scripts/bench_step.py            # both sizes, about four minutes on two cores
    python scripts/bench_step.py --smoke    # toy sizes: only shows that it runs
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, int]] = {
    "toy": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512},
    "10M": {"hidden_size": 320, "num_hidden_layers": 6, "vocab_size": 4096},
    "51M": {"hidden_size": 640, "num_hidden_layers": 8, "vocab_size": 8192},
}


def build(size: str, batch: int, length: int) -> tuple[Any, Any, Any]:
    """Model, forget batch, retain batch."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = SIZES[size]
    model = LlamaForCausalLM(
        LlamaConfig(
            **shape,
            intermediate_size=4 * shape["hidden_size"],
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=length,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )
    ids = torch.randint(0, shape["vocab_size"], (2, batch, length))
    return model, *({"input_ids": x, "labels": x} for x in ids)


def steppers(size: str, batch: int, length: int) -> tuple[Any, Any, Any, int]:
    """The ROSU step, three plain passes, the optimizer's step, parameter bytes."""
    import torch

    from rosu_llm import UnlearningStep
    from rosu_llm.losses import COUNT, LossContext, get_loss

    model, forget, retain = build(size, batch, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    nll = get_loss("nll", "retain").function

    def loss(part: Any) -> Any:
        return nll(model, part, LossContext()) / COUNT["token"](part)

    step = UnlearningStep(model, optimizer, rho=0.1)

    def rosu() -> None:
        step(lambda: loss(forget), lambda: loss(retain))

    def passes() -> None:
        for part in (forget, retain, retain):
            optimizer.zero_grad(set_to_none=True)
            loss(part).backward()

    size_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return rosu, passes, optimizer.step, size_bytes


def child(arguments: argparse.Namespace) -> None:
    """Take three steps of one kind and print the peak resident size in bytes."""
    rosu, passes, adam, _ = steppers(arguments.child_size, arguments.batch, arguments.length)
    for _ in range(3):
        if arguments.child == "rosu":
            rosu()
        else:
            passes()
            adam()
    # VmHWM, not ru_maxrss: the latter starts from the peak of the process that forked this one
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(json.dumps(int(status["VmHWM"].split()[0]) * 1024))


def memory(size: str, kind: str, arguments: argparse.Namespace) -> int:
    """Peak resident size of a fresh process."""
    command = [sys.executable, __file__, "--child", kind, "--child-size", size]
    command += ["--batch", str(arguments.batch), "--length", str(arguments.length)]
    return int(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["10M", "51M"], choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    parser.add_argument("--child", choices=["rosu", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--child-size", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    if arguments.smoke:
        arguments.sizes, arguments.repeats, arguments.batch, arguments.length = ["toy"], 2, 2, 16

    import torch
    from rich.console import Console
    from rich.table import Table

    torch.set_num_threads(1)
    table = Table(title="Cost of a ROSU step")
    for column in ("parameters", "step / 3 passes", "step / (3 passes + AdamW)", "extra memory (parameter copies)"):
        table.add_column(column, justify="right")
    rows = []
    for size in arguments.sizes:
        rosu, passes, adam, size_bytes = steppers(size, arguments.batch, arguments.length)
        rosu(), passes(), adam()
        steps, plain, optimizer = [], [], []
        for _ in range(arguments.repeats):
            started = time.process_time()
            rosu()
            middle = time.process_time()
            passes()
            late = time.process_time()
            adam()
            steps.append(middle - started)
            plain.append(late - middle)
            optimizer.append(time.process_time() - late)
        copies = (memory(size, "rosu", arguments) - memory(size, "plain", arguments)) / size_bytes
        time_ratio = min(steps) / min(plain)
        algebra_ratio = min(steps) / (min(plain) + min(optimizer))
        rows.append(
            {
                "parameters": size_bytes // 4,
                "time_ratio": time_ratio,
                "time_ratio_with_adam": algebra_ratio,
                "extra_copies": copies,
            }
        )
        table.add_row(
            f"{size_bytes // 4:,}",
            f"{time_ratio:.3f}",
            f"{algebra_ratio:.3f}",
            f"{copies:.2f}",
        )
    Console().print(table)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
