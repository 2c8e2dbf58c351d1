"""Which model was evaluated, to the byte: results are reused for the same weights and for nothing else.

A name or a folder says nothing: an unlearned model has the same tensor names, shapes and file sizes as its original,
and copies keep modification times. So a local folder is identified by the SHA-256 of every file that takes part
(weights, configuration, tokenizer, code): one reading of the files, which the loading that follows finds in memory.
A hub model is identified by its id and commit, which is a hash already.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError

TAKES_PART = (".safetensors", ".json", ".model", ".txt", ".jinja", ".py", ".tiktoken")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
CHUNK = 1 << 22


@dataclass(frozen=True)
class Model:
    """A model that can be loaded: ``source`` is a folder or a hub id, ``revision`` a commit for the latter."""

    name: str
    source: str
    revision: str = "main"
    local: bool = True

    @property
    def label(self) -> str:
        """A short name for tables and files."""
        return Path(self.source).resolve().name if self.local else self.source.split("/")[-1]


def find_model(name: str) -> Model:
    """The model called ``name``, checked as far as can be done without loading it."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        return Model(name, str(folder))
    if folder.exists():
        raise ConfigError(f"{name!r} is a file. Give the model's folder, or a hub id such as owner/name.")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(
            f"The model folder {name!r} does not exist. Give an existing folder, or a hub id (owner/name)."
        )
    return Model(name, name, _hub_commit(name), local=False)


def identity(model: Model) -> str:
    """``sha256:…`` of a folder's contents, or ``hub:owner/name@commit``."""
    if not model.local:
        return f"hub:{model.source}@{model.revision}"
    total = hashlib.sha256()
    for path in sorted(Path(model.source).iterdir()):
        if path.is_file() and path.suffix in TAKES_PART:
            total.update(f"{path.name}\0{_digest(path)}\n".encode())
    return f"sha256:{total.hexdigest()}"


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        hint = "It holds an adapter: merge it into its base model first." if adapter else "Is it a model folder?"
        raise ConfigError(f"The model folder {str(folder)!r} has no config.json. {hint}")
    weights = {path.name for path in folder.glob("*.safetensors")}
    if not weights:
        raise ConfigError(
            f"The model folder {str(folder)!r} has no *.safetensors file, the only weight format read here. "
            "Save the model with save_pretrained."
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        missing = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) - weights)
        if missing:
            raise ConfigError(
                f"The model folder {str(folder)!r} lacks {len(missing)} of its shards, first {missing[0]}."
            )
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise ConfigError(
            f"The model folder {str(folder)!r} has no tokenizer ({', '.join(TOKENIZER_FILES[:2])}, …). "
            "Copy the base model's tokenizer files into it, or save it with tokenizer.save_pretrained."
        )


def _hub_commit(name: str) -> str:
    from huggingface_hub import hf_hub_download

    try:
        path = Path(hf_hub_download(name, "config.json"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name!r} is neither a folder here nor a model that the hub gave ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}). Check the name, the connection, and access to gated models."
        ) from error
    return path.parent.name
