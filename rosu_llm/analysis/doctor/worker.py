"""One of the processes that ``rosu doctor`` starts (:mod:`.launch`); each stage ends in a file of results or an error.

    python -m rosu_llm.analysis.doctor.worker FOLDER STEPS STAGE…

A stage is a layout, ``local`` (every process alone, on its own device) or ``meet`` (the processes find each other).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...compat import accelerator_kind, device_name
from ...files import write_atomically

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def main(folder: Path, steps: int, stages: list[str]) -> None:
    """Run the stages in order; the first error ends the process."""
    threading.Thread(target=end_with_parent, args=(folder,), daemon=True).start()
    warnings.simplefilter("ignore")
    stage = stages[0]
    try:
        import torch

        device = own_device()
        torch.set_num_threads(1)
        for stage in stages:
            start = time.perf_counter()
            found = _meet(device) if stage == "meet" else _train(stage, device, steps)
            _write(folder, stage, found, {**_describe(device), "seconds": time.perf_counter() - start})
        if "meet" in stages:
            torch.distributed.barrier()
    except BaseException as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        with suppress(OSError):  # a full disk
            write_atomically(folder / f"{stage}.{RANK}.error", text.encode(errors="replace"))
        os._exit(1)
    os._exit(0)  # all is written; tearing down gloo's threads now and then aborts the process


def end_with_parent(folder: Path) -> None:
    """Once the process that holds this one's input is gone, end, with what was started (compilers) and written."""
    sys.stdin.buffer.read()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def own_device() -> Any:
    """The device with the number of this process, of the kind this machine has."""
    import torch

    kind = accelerator_kind()
    if kind is None:
        return torch.device("cpu")
    getattr(torch, kind).set_device(RANK)
    return torch.device(kind, RANK)


def _describe(device: Any) -> dict[str, Any]:
    """Name and memory of the device."""
    import torch

    if device.type == "cpu":
        return {"device": "cpu"}
    of, name = getattr(torch, device.type), device_name(device.type, device.index)
    if not hasattr(of, "mem_get_info"):
        return {"device": name}
    free, total = of.mem_get_info(device.index)
    return {"device": name, "free": free, "total": total}


def _meet(device: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend_of(device.type))
    total = torch.tensor([RANK + 1.0], device=device)
    dist.all_reduce(total)
    expected = WORLD * (WORLD + 1) / 2
    if float(total) != expected:
        raise RuntimeError(f"all_reduce summed 1 to {WORLD} over the processes to {float(total):g}, not {expected:g}")
    return {}


def backend_of(kind: str) -> str:
    """The library through which devices of this kind exchange tensors."""
    import torch.distributed as dist

    if kind == "cpu":
        return "gloo"
    if hasattr(dist, "get_default_backend_for_device"):  # torch ≥ 2.6
        return str(dist.get_default_backend_for_device(kind))
    return {"xpu": "xccl", "npu": "hccl", "mlu": "cncl", "musa": "mccl"}.get(kind, "nccl")


def _train(layout: str, device: Any, steps: int) -> dict[str, Any]:
    from .spread import SpreadModel

    model = SpreadModel(layout, device, samples=4 * WORLD)
    start = model.weights()
    for step in range(steps):
        model.take(step)
    model.step.release()
    return {"start": start, "end": model.weights()}


def _write(folder: Path, stage: str, tensors: dict[str, Any], notes: dict[str, Any]) -> None:
    from safetensors.torch import save

    write_atomically(folder / f"{stage}.{RANK}.safetensors", save(tensors, metadata={"notes": json.dumps(notes)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
