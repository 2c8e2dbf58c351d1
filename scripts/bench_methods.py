"""What a step of each method costs: time in passes, memory in parameter copies.

Time: a whole step (passes, vector algebra, AdamW, pull) over one plain forward+backward pass on the same batch,
alternating in one process, fastest over fastest. Memory: peak resident size of a process that takes steps of the method
minus that of one that takes plain AdamW steps, over the bytes of the trainable parameters.

    python scripts/bench_methods.py            # 10 M parameters, about ten minutes on one core
    python scripts/bench_methods.py --smoke    # toy size: only shows that it runs
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_step import build

#: Method and options; rank-k methods protect four retain examples.
VARIANTS: dict[str, dict[str, Any]] = {
    "rosu": {},
    "rosu, protect_rank: 4": {"protect_rank": 4},
    "rosu, metric: adam": {"metric": "adam"},
    "rosu, jacobian: none": {"jacobian": "none"},
    "rosu, jacobian: exact": {"jacobian": "exact"},
    "rosu, jacobian: no_a1": {"jacobian": "no_a1"},
    "rosu, jacobian: no_a2": {"jacobian": "no_a2"},
    "minmax": {},
    "uam": {},
    "sam_npo": {},
    "orthograd, protect_rank: 4": {"protect_rank": 4},
    "gu, protect_rank: 4": {"protect_rank": 4},
    "graddiff": {},
    "pcgrad": {},
    "blur": {},
    "ft": {},
    "ng": {},
    "llmu": {},
    "scrub": {},
    "ssd, fisher: window": {"fisher": "window"},
}


def steppers(name: str | None, size: str, batch: int, length: int) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    """A step of the method (of plain AdamW for None), one plain pass, parameter bytes."""
    import torch

    from rosu_llm import UnlearningStep
    from rosu_llm.losses import COUNT, LossContext, get_loss

    model, forget, retain = build(size, batch, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    nll = get_loss("nll", "retain").function

    def loss(part: Any) -> Any:
        return nll(model, part, LossContext()) / COUNT["token"](part)

    def plain() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(retain).backward()

    def adam() -> None:
        plain()
        optimizer.step()

    def run() -> None:
        method = (name or "").partition(",")[0]
        if method == "scrub":  # a step takes one part
            step((), lambda: loss(retain))
        elif method == "llmu":
            step(lambda: loss(forget), lambda: loss(retain), mismatch=lambda: loss(forget))
        else:
            step(lambda: loss(forget), lambda: loss(retain), samples=singles)

    rows = [{key: value[i : i + 1] for key, value in retain.items()} for i in range(min(4, batch))]
    singles = [lambda row=row: loss(row) for row in rows] if name and "protect_rank" in VARIANTS[name] else []
    size_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    if name is None:
        return adam, plain, size_bytes
    options = {**VARIANTS[name]}
    if "protect_rank" in options:
        options["protect_rank"] = len(singles)
    step = UnlearningStep(model, optimizer, method=name.partition(",")[0], rho=0.1, total_steps=10**6, **options)
    return run, plain, size_bytes


def peak(name: str, arguments: argparse.Namespace) -> int:
    """Peak resident size of a fresh process that takes three steps."""
    command = [sys.executable, __file__, "--child", name, "--size", arguments.size]
    command += ["--batch", str(arguments.batch), "--length", str(arguments.length)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def child(arguments: argparse.Namespace) -> None:
    """Three steps, then the peak on standard output."""
    name = None if arguments.child == "plain" else arguments.child
    step, _, _ = steppers(name, arguments.size, arguments.batch, arguments.length)
    for _ in range(3):
        step()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(json.dumps(int(status["VmHWM"].split()[0]) * 1024))


def main() -> None:
    """Measure and print a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="10M")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    if arguments.smoke:
        arguments.size, arguments.repeats, arguments.batch, arguments.length = "toy", 2, 4, 16
        arguments.methods = arguments.methods[:1]
    base = peak("plain", arguments)
    print("| method | step / one pass | extra memory (copies) |")
    print("|---|---:|---:|")
    for name in arguments.methods:
        step, plain, size_bytes = steppers(name, arguments.size, arguments.batch, arguments.length)
        step(), plain()
        steps, passes = [], []
        for _ in range(arguments.repeats):
            started = time.perf_counter()
            step()
            middle = time.perf_counter()
            plain()
            steps.append(middle - started)
            passes.append(time.perf_counter() - middle)
        copies = (peak(name, arguments) - base) / size_bytes
        print(f"| {name} | {min(steps) / min(passes):.2f} | {copies:.1f} |", flush=True)


if __name__ == "__main__":
    main()
