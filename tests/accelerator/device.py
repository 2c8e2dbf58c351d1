"""A simulated accelerator: tensors that say they are on ``npu:0``, hold real values, and refuse what CUDA refuses.

It finds, on a machine without a GPU, what only shows on one: CPU and device tensors in one operation, a CPU generator
for device tensors, ``.numpy()`` of a device tensor, a CPU tensor handed to a device's collective, random state that is
not replayed on the device. It runs out of memory at a limit that a test sets. Values are those of torch's CPU kernels,
so weights can be compared with a CPU run. `recorder.py` counts what the host waits for and what the device makes.

How: torch's third-party device is renamed to a name that accelerate and transformers know (``npu``; a stub stands for
``torch_npu``). The extension in `native/` registers one fallback for all operations: it checks devices as CUDA does,
lends the memory of device tensors to CPU tensors, calls the CPU kernel, and gives results the device's name. Which
operations take a zero-dimensional CPU tensor is read from torch's own ``native_functions.yaml``.

What it cannot show: speed, asynchrony, CUDA's rounding, order of reductions and random numbers, kernels without a CPU
counterpart (flash attention, Triton), NCCL's timeouts. Branches on ``device.type == "cuda"`` are not taken. It uses
internals of torch 2.13.

    python -m tests.accelerator.device        # builds it (half a minute, once); g++ and ninja are needed
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import os
import re
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

NAME = "npu"
NATIVE = Path(__file__).parent / "native"

_extension: Any = None


def missing() -> str | None:
    """What the build lacks on this machine; None if nothing."""
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    lacking = [tool for tool in ("g++", "ninja") if shutil.which(tool, path=search) is None]
    if lacking:
        return f"no {' and no '.join(lacking)}"
    return None if torch.__version__.startswith("2.13.") else f"made for torch 2.13, not {torch.__version__}"


def build() -> Any:
    """The extension, from torch's cache unless its sources have changed."""
    from torch.utils.cpp_extension import load

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # finds ninja
    text = b"".join(path.read_bytes() for path in sorted(NATIVE.iterdir()))
    name = f"simulated_accelerator_{hashlib.sha256(text + torch.__version__.encode()).hexdigest()[:12]}"
    return load(name, [str(NATIVE / "device.cpp")], extra_cflags=["-O1", "-g0"], verbose=False)


def install(devices: int = 1) -> Any:
    """Make ``torch.device("npu")`` exist; to be called before transformers and accelerate are imported."""
    global _extension
    if _extension is not None:
        return _extension
    late = [name for name in ("accelerate", "transformers") if name in sys.modules]
    if late:
        raise RuntimeError(f"install() must come before importing {late}: they look for devices only once")
    _extension = build()
    torch.utils.rename_privateuse1_backend(NAME)
    _extension.setup(devices, _lenient_operations())
    torch._register_device_module(NAME, _module(devices))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    stub: Any = types.ModuleType("torch_npu")
    stub.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    stub.__version__, stub.__file__, stub.__getattr__ = "0", __file__, _kernel
    sys.modules["torch_npu"] = stub
    os.environ.setdefault("ASCEND_HOME_PATH", str(NATIVE))  # DeepSpeed looks for a compiler there
    torch.distributed.Backend.register_backend("hccl", _create_collectives, devices=[NAME])
    return _extension


def limit(spare: int | None) -> None:
    """From now on ``spare`` bytes more can be allocated than are now; None: any number."""
    _extension.limit(None if spare is None else _extension.live() + spare)


def _kernel(name: str) -> Any:
    """Fused kernels of the real ``torch_npu``: importable, as transformers does, and not callable."""
    if not name.startswith("npu_"):
        raise AttributeError(f"the stub torch_npu has no {name!r}")

    def call(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"torch_npu.{name} is not simulated")

    return call


def _lenient_operations() -> list[str]:
    """Operations whose CUDA kernels accept zero-dimensional CPU tensors, from torch's own table."""
    import torchgen

    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    found, name = [], ""
    for line in table.read_text().splitlines():
        if match := re.match(r"- func: ([\w.]+)\(", line):
            name = match.group(1)
        elif "device_check: NoCheck" in line:
            found.append(f"aten::{name}")
    return found


def _create_collectives(store: Any, rank: int, size: int, timeout: Any) -> Any:
    gloo = torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
    return _extension.collectives(gloo, rank, size)


def _index(device: Any) -> int:
    if device is None:
        return int(_extension.current())
    if isinstance(device, int):
        return device if device >= 0 else int(_extension.current())
    found = torch.device(device)
    return int(_extension.current()) if found.index is None else found.index


def _module(count: int) -> types.ModuleType:
    """What ``torch.npu`` offers, as ``torch.cuda`` does."""
    m: Any = types.ModuleType(f"torch.{NAME}")
    m.is_available = m.is_initialized = m._is_compiled = lambda: True
    m._is_in_bad_fork = lambda: False
    m._initialized = True  # torch.utils.checkpoint keeps the device's random state only where this is set
    m.init = m._lazy_init = m.empty_cache = m.ipc_collect = lambda *_: None
    m.device_count = lambda: count
    m.current_device = lambda: int(_extension.current())
    m.set_device = lambda device: _extension.use(_index(device))
    m.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    m.is_bf16_supported = lambda *_, **__: True
    m.memory_allocated = m.memory_reserved = lambda *_: int(_extension.live())
    m.max_memory_allocated = m.max_memory_reserved = lambda *_: int(_extension.peak())
    m.reset_peak_memory_stats = m.reset_max_memory_allocated = lambda *_: _extension.reset_peak()
    m.memory_stats = lambda *_: {"allocated_bytes.all.current": m.memory_allocated()}
    m.mem_get_info = lambda *_: (1 << 40, 1 << 40)
    m.get_device_name = lambda *_: "simulated"
    m.get_device_capability = lambda *_: (8, 0)
    m.get_device_properties = lambda *_: types.SimpleNamespace(name="simulated", total_memory=1 << 40)
    m.default_generators = [_extension.generator(i) for i in range(count)]
    m.manual_seed = lambda seed: m.default_generators[_index(None)].manual_seed(int(seed)) and None
    m.manual_seed_all = lambda seed: [g.manual_seed(int(seed)) for g in m.default_generators] and None
    m.get_rng_state = lambda device=None: m.default_generators[_index(device)].get_state()
    m.set_rng_state = lambda state, device=None: m.default_generators[_index(device)].set_state(state) and None
    m.get_rng_state_all = lambda: [g.get_state() for g in m.default_generators]
    m.set_rng_state_all = lambda all_: (
        [g.set_state(s) for g, s in zip(m.default_generators, all_, strict=True)] and None
    )
    m.random = types.SimpleNamespace(**{k: getattr(m, k) for k in dir(m) if "rng_state" in k or "manual_seed" in k})
    m.amp = types.SimpleNamespace(GradScaler=lambda **options: torch.amp.GradScaler(NAME, **options))
    m.synchronize = lambda device=None: torch.Stream(torch.device(NAME, _index(device))).synchronize()
    m.Stream = lambda device=None, **_: torch.Stream(torch.device(NAME, _index(device)))
    m.Event = lambda *_, **__: torch.Event(NAME)
    m.current_stream = m.default_stream = lambda device=None: m.Stream(device)
    m.stream = lambda _: contextlib.nullcontext()

    def exchange(index: int) -> int:
        before = int(m.current_device())
        if index >= 0:
            m.set_device(index)
        return before

    @contextlib.contextmanager
    def on(device: Any) -> Iterator[None]:
        before = exchange(_index(device))
        try:
            yield
        finally:
            m.set_device(before)

    m.device, m._exchange_device, m._maybe_exchange_device = on, exchange, exchange
    return m


if __name__ == "__main__":
    build()
