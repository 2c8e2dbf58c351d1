"""A checkpoint as files: which tensor lies where, and a copy in which some tensors are replaced.

The safetensors format is a length, a JSON header and raw bytes. A trained model that differs from its
original in three matrices is written by copying the original's files and overwriting those bytes: every
other byte is identical, no model is held in memory, and the original is only ever read.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import ConfigError, DataError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

#: What goes along with the weights: configuration, tokenizer, chat template, code of custom models.
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".vocab")
_NOT_COMPANIONS = (
    *(INDEX, "pytorch_model.bin.index.json", "trainer_state.json", "training_args.json"),
    *("rosu_run.json", "rosu_files.json"),  # of the run that made the original
)

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: its type, its shape, and the first byte and the byte after the last in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file; raises where the file is cut short or is something else."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError("its header is longer than the file")
            header: dict[str, Any] = json.loads(file.read(length))
        start = 8 + length
        entries = {
            name: Entry(e["dtype"], tuple(e["shape"]), start + e["data_offsets"][0], start + e["data_offsets"][1])
            for name, e in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DataError(f"{path} is not a whole safetensors file ({error}). Download it again.") from error
    expected = max((e.end for e in entries.values()), default=start)
    if size != expected:
        raise DataError(f"{path} has {size} bytes instead of {expected}: it is cut short. Download it again.")
    return entries


class CheckpointFiles:
    """The safetensors files of one model folder. Every file is checked when this is made."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise DataError(f"{str(folder)!r} is not a folder.")
        self.entries: dict[str, Entry] = {}
        self.where: dict[str, str] = {}
        for name in self._shards():
            path = self.folder / name
            if not path.is_file():
                raise DataError(f"{self.folder} lacks {name}, which its index names. Download the model again.")
            for tensor, entry in read_header(path).items():
                self.entries[tensor], self.where[tensor] = entry, name

    def _shards(self) -> list[str]:
        if (self.folder / SINGLE).is_file():  # transformers, too, prefers it to an index beside it
            return [SINGLE]
        index = self.folder / INDEX
        if index.is_file():
            try:
                files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise DataError(f"{index} is not an index of safetensors files ({error}).") from error
            outside = [name for name in files if Path(name).name != name]
            if outside:
                raise DataError(f"{index} names files outside its folder: {', '.join(outside[:3])}.")
            return files
        raise DataError(
            f"{self.folder} holds neither {SINGLE} nor {INDEX}. Only safetensors are read: save the model with "
            "save_pretrained of a current transformers first."
        )

    @property
    def shards(self) -> list[str]:
        """Files that hold weights."""
        return sorted(set(self.where.values()))

    @property
    def companions(self) -> list[str]:
        """Files that go along with them."""
        return sorted(
            p.name
            for p in self.folder.iterdir()
            if p.is_file() and p.suffix in _COMPANIONS and p.name not in _NOT_COMPANIONS
        ) + ([] if self.shards == [SINGLE] else [INDEX])

    @property
    def size(self) -> int:
        """Bytes a copy takes."""
        return sum((self.folder / name).stat().st_size for name in [*self.shards, *self.companions])

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, shard by shard: no more than one file is mapped at a time. Copy what you keep."""
        wanted: dict[str, list[str]] = {}
        for name in names:
            wanted.setdefault(self.where[name], []).append(name)
        for shard, group in wanted.items():
            with safe_open(str(self.folder / shard), framework="pt") as file:
                for name in group:
                    yield name, file.get_tensor(name)

    def check_destination(self, target: Path) -> None:
        """Refuse a target that is the original or has no room."""
        if target.resolve() == self.folder.resolve():
            raise ConfigError(f"output_dir={str(target)!r} is the original model: give another folder.")
        existing = next(p for p in (target, *target.resolve().parents) if p.exists())
        free = shutil.disk_usage(existing).free
        if free < self.size:
            raise ConfigError(
                f"output_dir={str(target)!r} has {free / 2**30:.1f} GiB free; the model takes "
                f"{self.size / 2**30:.1f} GiB. Free some space or give another folder."
            )

    def write_copy(self, target: Path, replaced: Mapping[str, Tensor]) -> None:
        """Copy the model to ``target`` with the tensors of ``replaced`` in place of the original's.

        They are rounded to the type in which the original stores them. Files are written beside their place and
        renamed, ``config.json`` last: a folder without it is not loaded as a model.
        """
        for name, tensor in replaced.items():
            entry = self.entries[name]
            if tuple(tensor.shape) != entry.shape or entry.dtype not in _DTYPES:
                raise DataError(f"{name} is stored as {entry.dtype} {entry.shape}, which {tuple(tensor.shape)} is not.")
        stage = target / ".saving"
        try:
            target.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(stage, ignore_errors=True)
            stage.mkdir()
            for name in [*self.shards, *self.companions]:
                shutil.copyfile(self.folder / name, stage / name)
            for name, tensor in replaced.items():
                _overwrite(stage / self.where[name], self.entries[name], tensor)
            (target / "config.json").unlink(missing_ok=True)
            for old in [*_held(target), target / INDEX]:
                old.unlink(missing_ok=True)
            for path in sorted(stage.iterdir(), key=lambda p: (p.name == "config.json", p.name)):
                os.replace(path, target / path.name)
        except OSError as error:
            full = error.errno == errno.ENOSPC
            raise DataError(
                f"The model could not be written to {str(target)!r}: "
                + ("the disk is full." if full else f"{error.strerror or error}.")
                + " No new model was left there; the trained weights are in the newest checkpoint of the run, if it "
                "saved one (resume from it with room on the disk)."
            ) from error
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def _overwrite(path: Path, entry: Entry, tensor: Tensor) -> None:
    stored = tensor.detach().to("cpu", _DTYPES[entry.dtype]).contiguous()
    with path.open("r+b") as file:
        file.seek(entry.begin)
        file.write(stored.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _held(target: Path) -> list[Path]:
    """Files with weights in a folder."""
    return sorted([*target.glob("*.safetensors"), *target.glob("pytorch_model*.bin")])


def refuse_held(target: Path, *, overwrite: bool) -> None:
    """Refuse a folder that holds a model already, unless it may be overwritten."""
    held = _held(target)
    if held and not overwrite:
        raise ConfigError(
            f"output_dir={str(target)!r} already holds a model ({held[0].name}): give another folder, or pass "
            "--overwrite true."
        )


def stored_dtype(entry: Entry) -> torch.dtype:
    """The type in which a floating-point tensor is stored."""
    if entry.dtype not in _DTYPES:
        raise DataError(f"Weights stored as {entry.dtype} cannot be trained: use the unquantised checkpoint.")
    return _DTYPES[entry.dtype]
