"""Run cases on the simulated accelerator, and keep what becomes of them.

    python -m tests.accelerator.launch FOLDER PLAN.json

The plan is a list of launches, each some cases that the same processes run one after another. Importing takes longer
than any case, so it is done once: every rank of a launch is a fork. A case has a folder with what its ranks wrote and
said; FOLDER/ended.json says how the ranks of its launch ended, and after how many seconds.
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
from pathlib import Path
from typing import Any

from tests.accelerator import device

Case = dict[str, Any]

#: Seconds after which a rank that has not ended is ended.
PATIENCE = 60.0


def fork(cases: dict[str, Case], folder: Path, rank: int, port: int) -> int:
    """Start a rank of the cases, one after the other; its process id."""
    child = os.fork()
    if child:
        return child
    world = next(iter(cases.values())).get("world", 1)
    if world > 1:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in {**meeting, "RANK": rank, "LOCAL_RANK": rank}.items()})
    code = 0
    for name, case in cases.items():
        text = os.open(folder / name / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(text, 1)
        os.dup2(text, 2)
        try:
            from tests.accelerator import runs

            runs.run(case, folder / name)
        except BaseException:
            traceback.print_exc()
            code = 1
            if world > 1:
                break
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    os._exit(code)  # what torn-down threads of gloo say is of no interest


def wait(children: list[int]) -> tuple[list[Any], float]:
    """The exit codes in order, and the processor time of all.

    A code is minus the signal for a rank that was killed, ``hangs`` for one that had to be.
    """
    deadline = time.monotonic() + PATIENCE
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    folder, plan = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    device.install(devices=2)
    import tests.accelerator.runs  # noqa: F401  what every rank needs, imported before the first is started

    gc.freeze()  # accelerate collects garbage at every start: not among all that was imported
    ended = {}
    for cases in plan:
        for name in cases:
            (folder / name).mkdir(parents=True)
        began, port = time.monotonic(), free_port()
        world = next(iter(cases.values())).get("world", 1)
        codes, used = wait([fork(cases, folder, rank, port) for rank in range(world)])
        how = {"codes": codes, "seconds": round(time.monotonic() - began, 2), "processor": round(used, 2)}
        ended.update(dict.fromkeys(cases, how))
    (folder / "ended.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main()
