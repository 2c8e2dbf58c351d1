"""A process of ``rosu doctor`` in an installation that is broken: what it is told by ``BROKEN`` (layout → fault).

``unaveraged``: DDP's gradients of f and r stay those of one rank. ``raises``: an error on the second rank alone.
``killed``: the second rank is killed at once, and the first does nothing. ``sleeps``: nothing is ever done, and a
process of its own sleeps too.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rosu_llm.analysis.doctor import worker

FAULTS = json.loads(os.environ["BROKEN"])


def main() -> None:
    folder = Path(sys.argv[1])
    if "sleeps" in FAULTS.values():
        child = subprocess.Popen(["sleep", "600"])
        (folder.parent / f"pids{worker.RANK}").write_text(f"{os.getpid()} {child.pid}")
        threading.Thread(target=worker.end_with_parent, args=(folder,)).start()
        time.sleep(600)

    if "killed" in FAULTS.values():
        if worker.RANK == 1:
            print("about to die", flush=True)
            os.kill(os.getpid(), 9)
        time.sleep(600)

    from rosu_llm.space import LocalSpace

    train = worker._train

    def unaveraged(self: Any, *, last: bool) -> Any:
        return contextlib.nullcontext() if last and self.is_perturbed else self._no_sync()

    def faulty(layout: str, device: Any, steps: int) -> dict[str, Any]:
        fault, second = FAULTS.get(layout), worker.RANK == 1
        if fault == "unaveraged":
            LocalSpace.micro_batch = unaveraged  # type: ignore[method-assign]
        if fault == "raises" and second:
            raise OSError(f"cannot read {Path.home()}/secret/weights.bin")
        return train(layout, device, steps)

    worker._train = faulty
    worker.main(folder, int(sys.argv[2]), sys.argv[3:])


if __name__ == "__main__":
    main()
