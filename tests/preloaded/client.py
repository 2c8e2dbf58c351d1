"""Hand this call to the server in this folder, and end as it ends; copies begin with the line of an interpreter."""

import json
import os
import signal
import socket
import struct
import sys

#: Read while modules are imported, so that a fork would not notice them.
IMPORTED = ("HF_", "TRANSFORMERS_", "DATASETS_", "XDG_", "OMP_", "MKL_", "TORCH_LOGS", "TORCH_DEVICE", "LD_")
#: Set by lm-eval in every process that imports it, the tests' own among them; only downloads read it.
IGNORED = "HF_XET_HIGH_PERFORMANCE"
#: What the server has, whatever the tests' own environment says.
GIVEN = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    folder, name = os.path.split(os.path.abspath(sys.argv[0]))
    with open(os.path.join(folder, "server.json"), encoding="utf-8") as file:
        server = json.load(file)
    arguments = (["-m", "rosu_llm"] if name == "rosu" else []) + sys.argv[1:]
    if arguments[:1] == ["-u"]:  # torchrun's; the streams of a fork are flushed line by line anyway
        del arguments[0]
    environment = {**os.environ, **{key: os.environ.get(key, value) for key, value in GIVEN.items()}}
    differs = any(
        environment.get(key) != server["environment"].get(key)
        for key in {*environment, *server["environment"]}
        if key.startswith(IMPORTED) and key != IGNORED
    )
    if differs or not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")):
        os.execv(server["python"], [server["python"], *arguments])

    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(os.path.join(folder, "socket"))
    request = json.dumps({"arguments": arguments, "environment": environment, "folder": os.getcwd()}).encode()
    socket.send_fds(line, [struct.pack("<Q", len(request))], [0, 1, 2])
    line.sendall(request)
    (child,) = struct.unpack("<q", receive(line, 8))

    def forward(number, frame):
        try:
            os.kill(child, number)
        except ProcessLookupError:
            pass

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, forward)
    (status,) = struct.unpack("<q", receive(line, 8))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def receive(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = line.recv(count - len(data))
        if not part:
            sys.stderr.write("The server of preloaded interpreters is gone.\n")
            os._exit(70)
        data += part
    return data


main()
