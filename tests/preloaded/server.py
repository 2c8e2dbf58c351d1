"""Import once, then fork for every call of a client: ``server.py FOLDER INTERPRETER``.

Ends when its standard input does, that is, with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import Any


def preload() -> None:
    """What nearly every process of the tests imports; nothing here may start a thread."""
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import torch.distributed.run
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, Trainer  # noqa: F401

    assert torch.distributed.run, transformers
    gc.collect()
    gc.freeze()  # accelerate collects garbage at every start: not among all that was imported


def serve(folder: Path, interpreter: str) -> None:
    """Answer until standard input ends: a fork for each connection, killed when the client is gone."""
    children: dict[int, socket.socket] = {}
    wake, alarm = os.pipe()
    os.set_blocking(alarm, False)
    signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    (folder / "server.json").write_text(json.dumps({"python": sys.executable, "environment": dict(os.environ)}))
    partial = folder / "partial"
    door.bind(str(partial))
    door.listen(64)
    partial.rename(folder / "socket")
    chosen = selectors.DefaultSelector()
    for what in (door, wake, 0):
        chosen.register(what, selectors.EVENT_READ)
    while True:
        for key, _ in chosen.select():
            if key.fileobj == 0:
                for child in children:
                    _end(child)
                return
            if key.fileobj == wake:
                os.read(wake, 4096)
                _report_ended(children, chosen)
            elif key.fileobj is door:
                line, _ = door.accept()
                try:
                    call = _asked(line)
                except (OSError, struct.error):  # the client was killed before it had said what it wants
                    line.close()
                    continue
                child = _fork(*call, interpreter)
                children[child] = line
                chosen.register(line, selectors.EVENT_READ, child)
                with contextlib.suppress(OSError):  # killed since: the selector says so next
                    line.sendall(struct.pack("<q", child))
            elif key.data in children:  # the client is gone, for it says nothing more
                _end(key.data)
                chosen.unregister(key.fileobj)


def _end(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:  # it has no group of its own yet, or has ended
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _report_ended(children: dict[int, socket.socket], chosen: selectors.BaseSelector) -> None:
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            return
        line = children.pop(child)
        if line in {key.fileobj for key in chosen.get_map().values()}:
            chosen.unregister(line)
        try:
            line.sendall(struct.pack("<q", status))
        except OSError:  # the client was killed
            pass
        line.close()


def _asked(line: socket.socket) -> tuple[bytes, list[int]]:
    """What a client wants to be run, and its streams."""
    head, streams, _, _ = socket.recv_fds(line, 8, 3)
    (size,) = struct.unpack("<Q", head)
    text = b""
    while len(text) < size:
        part = line.recv(size - len(text))
        if not part:
            raise OSError("the client is gone")
        text += part
    return text, streams


def _fork(text: bytes, streams: list[int], interpreter: str) -> int:
    child = os.fork()
    if child == 0:
        try:
            become(json.loads(text), streams, interpreter)
        finally:
            os._exit(1)
    for stream in streams:
        os.close(stream)
    return child


def become(call: dict[str, Any], streams: list[int], interpreter: str) -> None:
    """Be the interpreter that was called, and end as it would."""
    signal.set_wakeup_fd(-1)
    os.setsid()  # whatever it starts ends with it
    for number in (signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
    os.closerange(3, 1024)
    os.chdir(call["folder"])
    os.environ.clear()
    os.environ.update(call["environment"])
    sys.executable = interpreter
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = _run(call["arguments"])
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _run(arguments: list[str]) -> int:
    base = [path for path in sys.path if path != str(Path(__file__).parent)]
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    kind, rest = arguments[0], arguments[1:]
    try:
        if kind == "-m":
            sys.argv, sys.path[:] = rest, [os.getcwd(), *added, *base]
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv, sys.path[:] = ["-c", *rest[1:]], ["", *added, *base]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv, sys.path[:] = arguments, [str(Path(kind).resolve().parent), *added, *base]
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    preload()
    serve(Path(sys.argv[1]), sys.argv[2])
