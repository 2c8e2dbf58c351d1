"""What the fast path of representation-level unlearning saves, on a Mistral-shaped model with 32 layers.

Time: one ROSU step on the fast path, the same step by full passes with a copied reference, and a straightforward RMU
step (three full forward passes, copied reference), on the same batches, interleaved in one process; medians, as ratios.
Memory: peak resident size of a process that loads the checkpoint and takes steps, minus its size before loading.
Loading: peak while the lower layers are loaded, against the bytes of those layers and the largest file.

    python scripts/bench_wmdp.py             # about ten minutes on one core
    python scripts/bench_wmdp.py --zephyr    # also one fast step at Zephyr's true width (12 GB of memory and 4 of disk)
    python scripts/bench_wmdp.py --smoke     # toy sizes: only shows that it runs
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TARGET, TRAINED = 7, r"layers\.(5|6|7)\.mlp\.down_proj\.weight$"
SIZES: dict[str, dict[str, int]] = {
    "toy": {"hidden": 32, "layers": 9, "vocabulary": 128, "batch": 2, "length": 16},
    "narrow": {"hidden": 256, "layers": 32, "vocabulary": 8000, "batch": 4, "length": 256},
    "zephyr": {"hidden": 4096, "layers": 8, "vocabulary": 1000, "batch": 1, "length": 32},
}


def make_checkpoint(size: str, folder: Path) -> None:
    """A random Mistral-shaped checkpoint in files of at most a tenth of it; bf16 at true width, as Zephyr's is."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    shape = SIZES[size]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if size == "zephyr" else torch.float32)
    wide = size == "zephyr"
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=shape["vocabulary"],
            hidden_size=shape["hidden"],
            intermediate_size=int(3.5 * shape["hidden"]),
            num_hidden_layers=shape["layers"],
            num_attention_heads=32 if wide else 8,
            num_key_value_heads=8 if wide else 2,
            sliding_window=None,
        )
    )
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=total // 10)


def batches(size: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A forget and a retain batch, one row padded."""
    import torch

    shape = SIZES[size]
    generator = torch.Generator().manual_seed(1)
    result = []
    for _ in range(2):
        ids = torch.randint(0, shape["vocabulary"], (shape["batch"], shape["length"]), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -shape["length"] // 4 :] = 0
        result.append({"input_ids": ids, "attention_mask": mask})
    return result[0], result[1]


def rosu_step(folder: Path, path: str, size: str) -> Callable[[], Any]:
    """One ROSU step, by the trainer's own code, on the fast or the plain path."""
    from rosu_llm import RepresentationConfig, RepresentationTrainer

    config = RepresentationConfig(
        output_dir=str(folder / "unused"), path=path, use_cpu=True, report_to=[], learning_rate=5e-5, max_steps=1
    )
    trainer = RepresentationTrainer(str(folder), config)
    trainer.create_optimizer_and_scheduler(1)
    forget, retain = batches(size)

    def step() -> Any:
        outcome = trainer._update(trainer.model, [{"forget": forget, "retain": retain}])
        trainer.optimizer.step()
        return outcome

    return step


def rmu_step(folder: Path, size: str) -> Callable[[], Any]:
    """RMU as its description reads: forget activations to a random vector, retain ones to the frozen copy's."""
    import torch
    from torch.nn.functional import mse_loss
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    frozen = copy.deepcopy(model)
    trained = []
    for name, p in model.named_parameters():
        p.requires_grad_(any(f"layers.{i}.mlp.down_proj.weight" in name for i in (5, 6, 7)))
        trained += [p] if p.requires_grad else []
    optimizer = torch.optim.AdamW(trained, lr=5e-5)
    control = torch.rand(SIZES[size]["hidden"])
    control = 6.5 * control / control.norm()
    forget, retain = batches(size)

    def hidden(which: Any, batch: Any) -> Any:
        seen = []
        hook = which.model.layers[TARGET].register_forward_hook(lambda _, __, out: seen.append(out))
        which(**batch, use_cache=False)
        hook.remove()
        return seen[0][0] if isinstance(seen[0], tuple) else seen[0]

    def step() -> Any:
        moved = hidden(model, forget)
        with torch.no_grad():
            target = hidden(frozen, retain)
        loss = mse_loss(moved, control.expand_as(moved)) + 1200.0 * mse_loss(hidden(model, retain), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


class Peak:
    """Highest resident size of this process while the block runs, sampled."""

    def __enter__(self) -> Peak:
        self.start = self.highest = resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.highest = max(self.highest, resident())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def grown(self) -> int:
        return self.highest - self.start


def resident() -> int:
    """Memory of this process that no file backs: pages of a mapped file are the system's to take back."""
    with open("/proc/self/status", encoding="ascii") as file:
        return 1024 * int(next(line for line in file if line.startswith("RssAnon")).split()[1])


def memory(kind: str, folder: Path, size: str, steps: int) -> dict[str, float]:
    """Peak of loading and of steps, in this process."""
    import gc

    import torch
    import transformers

    import rosu_llm.representation.trainer  # noqa: F401

    torch.set_num_threads(1)
    assert transformers.MistralForCausalLM
    gc.collect()
    with Peak() as peak:
        step = rmu_step(folder, size) if kind == "rmu" else rosu_step(folder, kind, size)
        for _ in range(steps):
            step()
    return {"peak": peak.grown}


def loading(folder: Path) -> dict[str, float]:
    """Peak while only the lower layers are loaded, and what it is to be compared with."""
    import torch
    import transformers

    from rosu_llm.representation.loading import load_truncated

    assert transformers.MistralForCausalLM
    torch.set_num_threads(1)
    with Peak() as peak:
        part = load_truncated(str(folder), target_layer=TARGET, trainable_parameters=TRAINED)
    kept = sum(p.numel() * p.element_size() for p in part.model.parameters())
    largest = max((folder / name).stat().st_size for name in part.files.shards)
    return {"peak": peak.grown, "kept": kept, "largest": largest, "whole": part.files.size}


def timing(folder: Path, size: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of each kind of step, interleaved."""
    import torch

    torch.set_num_threads(1)
    steps = {
        "fast": rosu_step(folder, "fast", size),
        "plain": rosu_step(folder, "plain", size),
        "rmu": rmu_step(folder, size),
    }
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def once(folder: Path, size: str) -> dict[str, float]:
    """One fast step at this size: seconds and peak memory, loading included."""
    import torch

    import rosu_llm.representation.trainer  # noqa: F401

    torch.set_num_threads(1)
    with Peak() as peak:
        step = rosu_step(folder, "fast", size)
        start = time.perf_counter()
        outcome = step()
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak": peak.grown, "retain_loss": outcome.losses["retain"]}


def here(job: str, folder: Path, size: str, count: int = 0) -> Any:
    """A job in this process."""
    jobs: dict[str, Callable[[], Any]] = {
        "make": lambda: make_checkpoint(size, folder),
        "timing": lambda: timing(folder, size, count),
        "loading": lambda: loading(folder),
        "once": lambda: once(folder, size),
    }
    return jobs[job]() if job in jobs else memory(job, folder, size, count)


def child(job: str, folder: Path, size: str, count: int = 0) -> Any:
    """A job in a process of its own, so that its memory is its own."""
    call = [sys.executable, __file__, "--job", job, "--folder", str(folder), "--size", size, "--count", str(count)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{job} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="toy sizes")
    parser.add_argument("--zephyr", action="store_true", help="also one step at true width")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--size", default="narrow", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print(json.dumps(here(options.job, options.folder, options.size, options.count)))
        return
    size = "toy" if options.smoke else "narrow"
    run = here if options.smoke else child
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("make", folder, size)
        seconds = run("timing", folder, size, 2 if options.smoke else options.repeats)
        medians = {kind: statistics.median(values) for kind, values in seconds.items()}
        peaks = {kind: run(kind, folder, size, 3)["peak"] for kind in ("fast", "plain", "rmu")}
        load = run("loading", folder, size)
    print(f"{SIZES[size]}")
    print("| step | median s | times fast | peak MB | fast / it |")
    print("|---|---:|---:|---:|---:|")
    for kind in ("fast", "plain", "rmu"):
        print(
            f"| {kind} | {medians[kind]:.3f} | {medians[kind] / medians['fast']:.2f} | {peaks[kind] / 1e6:.0f} | "
            f"{peaks['fast'] / max(peaks[kind], 1):.2f} |"
        )
    print(
        f"loading: peak {load['peak'] / 1e6:.1f} MB; layers kept {load['kept'] / 1e6:.1f} MB, largest file "
        f"{load['largest'] / 1e6:.1f} MB, whole model {load['whole'] / 1e6:.1f} MB"
    )
    if options.zephyr:
        with tempfile.TemporaryDirectory() as name:
            child("make", Path(name), "zephyr")
            result = child("once", Path(name), "zephyr")
        print(
            f"true width, 8 layers, {SIZES['zephyr']['length']} tokens: {result['seconds']:.1f} s per step, peak "
            f"{result['peak'] / 2**30:.2f} GiB (float32)"
        )


if __name__ == "__main__":
    main()
