"""Many launches of a few processes from one that has imported everything: importing takes longer than most cases.

A launch is some cases that the same processes run one after another. Nothing watches over its ranks but a clock.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Case = dict[str, Any]
#: Runs a case in this process and leaves what it has to say in the folder.
Runner = Callable[[Case, Path], None]

#: Seconds for a case; a rank that takes more is ended.
PATIENCE = 60


def run_launches(launches: Sequence[dict[str, Case]], folder: Path, run: Runner) -> None:
    """Run launches in turn; ``world`` of a case says in how many processes.

    FOLDER/case/rank*.txt is what the ranks print, FOLDER/ended.json how the ranks of its launch ended: their exit codes
    (minus the signal of one that was killed, ``hangs`` for one that had to be), seconds, and seconds of the processors.
    """
    gc.freeze()  # accelerate collects garbage at every start: not among all that was imported
    ended = {}
    for cases in launches:
        for name in cases:
            (folder / name).mkdir(parents=True)
        began, port, world = time.monotonic(), _free_port(), next(iter(cases.values())).get("world", 1)
        children = [_fork(cases, folder, run, rank, world, port) for rank in range(world)]
        codes, used = _wait(children, PATIENCE * len(cases))
        how = {"codes": codes, "seconds": round(time.monotonic() - began, 2), "processor": round(used, 2)}
        ended.update(dict.fromkeys(cases, how))
    (folder / "ended.json").write_text(json.dumps(ended))


def _fork(cases: dict[str, Case], folder: Path, run: Runner, rank: int, world: int, port: int) -> int:
    """Start a rank; its process id."""
    child = os.fork()
    if child:
        return child
    signal.alarm(PATIENCE * len(cases) + 30)  # also where nobody is left to end it
    if world > 1:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in {**meeting, "RANK": rank, "LOCAL_RANK": rank}.items()})
    code = 0
    for name, case in cases.items():
        text = os.open(folder / name / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(text, 1)
        os.dup2(text, 2)
        try:
            run(case, folder / name)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        if code and world > 1:
            break
    os._exit(code)  # at once: see leaving.py


def _wait(children: list[int], patience: float) -> tuple[list[Any], float]:
    deadline = time.monotonic() + patience
    codes: list[Any] = []
    seconds = 0.0
    for child in children:
        found, status, used = os.wait4(child, os.WNOHANG)
        while not found and time.monotonic() < deadline:
            time.sleep(0.01)
            found, status, used = os.wait4(child, os.WNOHANG)
        codes.append(os.waitstatus_to_exitcode(status) if found else "hangs")
        if not found:
            os.kill(child, signal.SIGKILL)
            _, _, used = os.wait4(child, 0)
        seconds += used.ru_utime + used.ru_stime
    return codes, seconds


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
