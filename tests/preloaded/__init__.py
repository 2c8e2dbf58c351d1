"""An interpreter that starts at once: a fork of a process that has imported what every test process imports.

Importing torch, transformers and what they need takes five seconds of a core; the suite starts about a hundred
processes. :func:`interpreter` is the path of a stand-in for ``sys.executable``: it hands its arguments, environment,
folder and open streams to a server, which forks, and it ends as the fork ends. Signals reach the fork, and it dies
when the stand-in is killed. What it cannot do like the real interpreter it leaves to that one: other flags than ``-m``
and ``-c``, and environments in which the imports would have gone another way.

Tests of what happens on import use ``sys.executable``.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("python", "rosu")


@lru_cache(maxsize=1)
def interpreter() -> str:
    """The stand-in for ``sys.executable``; ``rosu`` lies beside it. The server lives as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="rosu-preloaded-"))
    source = (HERE / "client.py").read_text(encoding="utf-8")
    for name in NAMES:
        path = folder / name
        path.write_text(f"#!{sys.executable} -IS\n{source}", encoding="utf-8")
        path.chmod(0o755)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(HERE / "server.py"), str(folder), str(folder / NAMES[0])]
    server = subprocess.Popen(command, env=environment, cwd=HERE.parent.parent, stdin=subprocess.PIPE)
    while not (folder / "socket").exists():
        if server.poll() is not None:
            raise RuntimeError("The server of preloaded interpreters ended at its start.")
        time.sleep(0.02)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.kill)
    return str(folder / NAMES[0])


def beside(environment: dict[str, str]) -> dict[str, str]:
    """The environment in which ``python`` and ``rosu`` are the stand-ins, for scripts and for torchrun."""
    path = interpreter()
    found = f"{Path(path).parent}{os.pathsep}{environment.get('PATH', '')}"
    return {**environment, "PATH": found, "PYTHON": path, "PYTHON_EXEC": path}
