"""Retain gradients that are stored before the first step, and the file that carries them to where no retain data is.

The file holds one tensor for each direction and trained parameter, ``m1.<name>``, ``m2.<name>``, …
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import ConfigError, DataError, UnsupportedLayoutError
from ..geometry.slots import stored_slot

KIND = "rosu/stored-gradients/1"


def parts_of(samples: Any, count: int) -> Iterator[list[Any]]:
    """``samples`` dealt out to ``count`` parts, as to players."""
    if samples is None or len(samples) < count:
        raise DataError(
            f"method='forget_only' stores directions={count} retain gradients, each of a part of the retain data, and "
            f"{'none was' if samples is None else f'{len(samples)} samples were'} given: pass memory_dataset=… with "
            "more samples, fewer directions, or memory_file=… of 'rosu memory build'."
        )
    for first in range(count):
        yield [samples[i] for i in range(first, len(samples), count)]


def whole_retain(given: Any, dataset: Any) -> Any:
    """All retain samples: those ``given``, else those that the training data lists."""
    samples: Any = getattr(dataset, "retain", None) if given is None else given
    if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")) or len(samples) == 0:
        raise DataError(
            f"memory_refresh takes the gradient of all retain samples, and a {type(dataset).__name__} does not list "
            "them: pass memory_dataset=…, train on a ForgetRetainDataset, or set memory_refresh=0."
        )
    return samples


def check_layout(layout: str) -> None:
    """Raise where a process holds only a part of every gradient."""
    if layout not in ("local", "ddp"):
        raise UnsupportedLayoutError(
            f"A memory file holds whole gradients, which {layout} takes apart: use one device or DDP, or give retain "
            "data and let the run store its own."
        )


def write_stored(
    memory: Mapping[str, Sequence[Tensor]],
    parameters: Mapping[str, nn.Parameter],
    model: nn.Module,
    path: Path,
    **about: Any,
) -> None:
    """Write what is stored beside ``path`` and rename; ``about`` is kept as text with it."""
    tensors = {
        f"{slot}.{name}": tensor.detach().cpu().contiguous()
        for slot, own in memory.items()
        for name, tensor in zip(parameters, own, strict=True)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial, metadata={"kind": KIND, "weights": _mark(model), "about": json.dumps(about)})
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_stored(
    path: str, parameters: Mapping[str, nn.Parameter], model: nn.Module, count: int
) -> dict[str, list[Tensor]]:
    """The first ``count`` directions of a file, which must be of these parameters of this model."""
    if not Path(path).expanduser().is_file():
        raise ConfigError(f"memory_file={path!r} is not there: make it with 'rosu memory build'.")
    memory: dict[str, list[Tensor]] = {}
    try:
        with safe_open(Path(path).expanduser(), "pt") as file:
            if (file.metadata() or {}).get("kind") != KIND:
                raise ConfigError(f"memory_file={path!r} holds no stored gradients: make it with 'rosu memory build'.")
            mark = (file.metadata() or {}).get("weights")
            known = set(file.keys())
            most = len({key.partition(".")[0] for key in known})
            if count > most:
                raise ConfigError(
                    f"memory_file={path!r} holds {most} directions, and directions={count} are asked for: lower that, "
                    "or build it again."
                )
            for slot in map(stored_slot, range(count)):
                memory[slot] = [_read(file, f"{slot}.{name}", p, path, known) for name, p in parameters.items()]
            strangers = sorted(known - {f"{slot}.{name}" for slot in _slots(known) for name in parameters})
    except SafetensorError as error:
        raise ConfigError(f"memory_file={path!r} cannot be read: {error}") from None
    if strangers:
        raise ConfigError(
            f"memory_file={path!r} also holds {strangers[0].partition('.')[2]!r}, which this run does not train: build "
            "it with the same model and adapter."
        )
    if mark not in (None, _mark(model)):
        raise ConfigError(
            f"memory_file={path!r} was built on other weights than this run begins with, and gradients say nothing "
            "elsewhere: build it with this model (for an adapter, with the same seed)."
        )
    return memory


def _mark(model: nn.Module) -> str:
    """What tells these weights from others, frozen ones too: a digest of the first values of each."""
    digest = sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()[:64].to("cpu", torch.float32)
        digest.update(f"{name} {tuple(parameter.shape)} {values.tolist()}".encode())
    return digest.hexdigest()


def _slots(keys: set[str]) -> set[str]:
    return {key.partition(".")[0] for key in keys}


def _read(file: Any, key: str, parameter: nn.Parameter, path: str, known: set[str]) -> Tensor:
    name = key.partition(".")[2]
    if key not in known:
        raise ConfigError(
            f"memory_file={path!r} lacks {name!r}, which is trained: build it with the same model and adapter."
        )
    tensor: Tensor = file.get_tensor(key)
    if tensor.shape != parameter.shape:
        raise ConfigError(
            f"memory_file={path!r} has {name!r} of shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}: it is of "
            "another model."
        )
    # A copy: where a tensor lies in memory decides how its sums round, and in the file it lies anywhere.
    return tensor.to(parameter.device, torch.float32, copy=True)
