"""Start the processes that try the layouts, follow them for a bounded time, and leave none behind.

One launch tries every layout. Where one fails, the processes cannot be used any more: its error is kept, and new ones
try the layouts that are left.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

WORKER = ("-m", "rosu_llm.analysis.doctor.worker")
ROOT = Path(__file__).resolve().parents[3]
#: Seconds that processes have to end by themselves after the first one did, and between two looks.
GRACE, PAUSE = 5.0, 0.05

Processes = list[subprocess.Popen[bytes]]


@dataclass(frozen=True)
class StageResult:
    """What the processes left of one stage: notes and tensors of each in order, or why there are none."""

    error: str | None = None
    notes: list[dict[str, Any]] = field(default_factory=list)
    tensors: list[dict[str, Tensor]] = field(default_factory=list)


def run_stages(
    folder: Path, stages: Sequence[str], processes: int, *, steps: int, timeout: float, cpu: bool
) -> dict[str, StageResult]:
    """Stage → result. ``local`` and ``meet``, which the others stand on, end everything when they fail."""
    results: dict[str, StageResult] = {}
    left = list(stages)
    while left:
        with _started(folder, left, processes, steps, cpu) as started:
            failed = _follow(folder, left, started, timeout)
        for stage in left if failed is None else left[: left.index(failed[0])]:
            results[stage] = _read(folder, stage, processes)
        if failed is None:
            return results
        results[failed[0]] = StageResult(failed[1])
        if failed[0] in ("local", "meet"):
            return results
        rest = left[left.index(failed[0]) + 1 :]
        left = ["meet", *rest] if rest else []
        for file in folder.glob("meet.*"):
            file.unlink()
    return results


@contextmanager
def _started(folder: Path, stages: Sequence[str], count: int, steps: int, cpu: bool) -> Iterator[Processes]:
    """The processes, each with a session of its own so that whatever they start ends with them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "ACCELERATE_"))},
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
        **({"DS_ACCELERATOR": "cpu"} if cpu else {}),
    }
    running: Processes = []
    try:
        for rank in range(count):
            with (folder / f"{rank}.log").open("wb") as log:
                running.append(
                    subprocess.Popen(
                        [sys.executable, *WORKER, str(folder), str(steps), *stages],
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        cwd=folder,
                        stdin=subprocess.PIPE,  # closed when this process ends, however it does: see worker.py
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        yield running
    finally:
        for process in running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in running:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _follow(folder: Path, stages: Sequence[str], running: Processes, timeout: float) -> tuple[str, str] | None:
    """Wait for every stage; the one that failed, with its reason."""
    for stage in stages:
        end = time.monotonic() + timeout
        while not _complete(folder, stage, len(running)):
            if any(process.poll() is not None for process in running):
                _settle(running)
                if _complete(folder, stage, len(running)):
                    break
                return stage, _reason(folder, stage, running)
            if time.monotonic() > end:
                return stage, f"no result after {timeout:g} s: the processes wait for each other, or for a compiler"
            time.sleep(PAUSE)
    _settle(running)
    return None


def _settle(running: Processes) -> None:
    """Give the processes a moment to end by themselves."""
    end = time.monotonic() + GRACE
    while time.monotonic() < end and any(process.poll() is None for process in running):
        time.sleep(PAUSE)


def _complete(folder: Path, stage: str, count: int) -> bool:
    return all((folder / f"{stage}.{rank}.safetensors").is_file() for rank in range(count))


def _reason(folder: Path, stage: str, running: Processes) -> str:
    """The first error that was written, which others may have followed; else how the first process ended."""
    errors = sorted(folder.glob(f"{stage}.*.error"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        return errors[0].read_text(encoding="utf-8")
    rank, code = next((at, int(p.returncode)) for at, p in enumerate(running) if p.returncode is not None)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    lines = (folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"process {rank} {how}" + (f"; it last said: {lines[-1][:300]}" if lines else "")


def _read(folder: Path, stage: str, count: int) -> StageResult:
    result = StageResult()
    for rank in range(count):
        with safe_open(folder / f"{stage}.{rank}.safetensors", "pt") as file:
            result.notes.append(json.loads(file.metadata()["notes"]))
            result.tensors.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return result
