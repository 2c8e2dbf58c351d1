"""The stand-in ends, prints, fails and dies as the real interpreter does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.preloaded import beside, interpreter

ENDINGS = {
    "good": "print('words')",
    "code": "import sys; sys.exit(3)",
    "text": "import sys; sys.exit('why')",
    "error": "raise ValueError('x')",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "aborted": "import os; os.abort()",
    "streams": "import sys; print(sys.stdin.read().upper()); print('e', file=sys.stderr)",
    "surroundings": "import os, sys; print(sys.argv, os.getcwd(), os.environ['ONE'], sys.flags.isolated)",
    "atexit": "import atexit; atexit.register(print, 'last')",
}


def run(python: str, code: str, folder: Path) -> Any:
    done = subprocess.run(
        [python, "-c", code, "an argument"],
        input="given", env={**os.environ, "ONE": "two"}, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr.splitlines()[-1:]


@pytest.mark.parametrize("code", ENDINGS.values(), ids=ENDINGS)
def test_it_ends_as_the_real_one(code: str, tmp_path: Path) -> None:
    assert run(interpreter(), code, tmp_path) == run(sys.executable, code, tmp_path)


def test_scripts_and_modules_are_found(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("word = 'found'")
    (tmp_path / "script.py").write_text("import beside, sys; print(beside.word, __name__, sys.argv[1:])")
    for words in ([str(tmp_path / "script.py"), "a"], ["-m", "script", "a"]):
        done = subprocess.run([interpreter(), *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == "found __main__ ['a']\n"


def test_signals_arrive_and_nothing_outlives_a_killed_stand_in(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen([interpreter(), "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(10) == -number
        for _ in range(200):
            if not Path(f"/proc/{child}").exists():
                break
            time.sleep(0.02)
        assert not Path(f"/proc/{child}").exists()


def test_a_client_that_says_nothing_does_no_harm() -> None:
    """Killed after it has connected, or in the middle of its call."""
    for said in (b"", b"\x01", b"\xff" + bytes(7) + b"{"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.connect(str(Path(interpreter()).parent / "socket"))
            line.sendall(said)
    assert subprocess.run([interpreter(), "-c", "print(1)"], capture_output=True, check=True).stdout == b"1\n"


def test_what_is_read_on_import_is_left_to_the_real_one() -> None:
    code = "import sys; print(sys.executable)"
    for variables, expected in (
        ({}, interpreter()),
        ({"HF_XET_HIGH_PERFORMANCE": "1"}, interpreter()),  # of a worker that imported lm-eval
        ({"HF_HOME": "elsewhere"}, sys.executable),
    ):
        done = subprocess.run(
            [interpreter(), "-c", code],
            env=beside({**os.environ, **variables}),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == expected
