"""Files that are whole or absent: written beside their destination and renamed; and conditions kept in them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError, DataError

WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model*.bin")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``content`` beside ``path`` and rename; of several processes that do so at once, the last one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> Path:
    """Write ``value`` so that ``path`` is absent, as it was, or complete; refuses NaN, which is not JSON."""
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def check_writable(folder: Path, setting: str) -> None:
    """Raise if nothing can be written to ``folder``, which may not exist yet; ``setting`` is how the user gave it.

    By writing a few bytes: permissions say nothing of read-only mounts, quotas and full disks.
    """
    there = folder
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "is not a folder")
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
    except OSError as error:
        why = "is a file" if error.errno == errno.ENOTDIR else (error.strerror or str(error)).lower()
        raise ConfigError(
            f"{setting} cannot be written to: {str(there)!r} {why}. Give another folder, or make room there."
        ) from error


def find_file(path: str | Path) -> Path | None:
    """The file itself, else the one that is installed with the package (``configs/recipes/x.yaml`` in any folder)."""
    file = Path(path)
    if not file.is_file() and file.parts[:1] == ("configs",):
        file = Path(str(files("rosu_llm.configs")), *file.parts[1:])
    return file if file.is_file() else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__}, not an object with named fields.")
    return value


def digest(path: Path) -> str:
    """``sha256:…`` of a file; computed once per process while the file stays as it is."""
    stat = path.stat()  # the time of modification alone can be set, and copies keep it
    return _digest(path.resolve(), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


@lru_cache(maxsize=4096)
def _digest(path: Path, *_: int) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            total.update(chunk)
    return f"sha256:{total.hexdigest()}"


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a model or adapter in ``folder``."""
    return sorted(path for pattern in WEIGHTS for path in folder.glob(pattern) if path.is_file())


def weight_digests(folder: Path) -> dict[str, str]:
    """File → digest of the weights in ``folder``: results are of these weights and of no others."""
    return {path.name: digest(path) for path in weight_files(folder)}


class _UniqueKeys(yaml.SafeLoader):
    """YAML without tags for Python objects, and without keys that silently replace an earlier one."""


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
            raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
        seen.add(str(key.value))
    return loader.construct_mapping(node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str) -> Any:
    """The content of a YAML text; raises ``yaml.YAMLError``, also for a key that is there twice."""
    try:
        return yaml.load(text, _UniqueKeys)  # noqa: S506 (a safe loader)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error


def changed_conditions(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two sets of conditions, each as ``key was …, now …``; empty if results are comparable.

    Both are compared as JSON reads them back (tuples are lists, keys are text), so that one of them may come from a
    file. Nested keys are joined by dots. A key that is missing equals one whose value is None.
    """
    old, new = (dict(_flat(json.loads(json.dumps(value, default=str)))) for value in (before, now))
    return [
        f"{key} was {old.get(key, 'not set')}, now {new.get(key, 'not set')}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def _flat(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _flat(inner, f"{path}{key}.")
        else:
            yield f"{path}{key}", inner


def part_of(checkpoint: str | Path, name: str, run: str) -> Path:
    """The file ``name`` of a checkpoint, which ``run`` leaves there; what it holds cannot be made up later."""
    path = Path(checkpoint) / name
    if not path.is_file():
        raise ConfigError(
            f"{str(checkpoint)!r} holds no {name}: it was not written by a run with {run}, and what that measured "
            "before its first step cannot be recovered."
        )
    return path
