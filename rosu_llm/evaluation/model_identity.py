"""Which model a folder or hub id holds, to the byte: results are reused for the same weights and for nothing else.

Neither name nor file sizes tell an unlearned model from its original, and copies keep modification times. So a folder
is identified by the SHA-256 of every file that affects results (weights, configuration, tokenizer, code); loading the
model afterwards finds these files in the page cache. A hub model is identified by its id and commit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files import digest, read_json, weight_digests, weight_files

ADAPTER = "adapter_config.json"
HASHED = (".safetensors", ".json", ".model", ".txt", ".jinja", ".py", ".tiktoken")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
WITHOUT_EFFECT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")
PER_CALL = ("truncation", "padding")  # of a tokenizer: set by every call


@dataclass(frozen=True)
class Model:
    """A model that can be loaded."""

    name: str  # as the user wrote it
    source: str  # folder or hub id
    revision: str = "main"  # commit of a hub model
    local: bool = True
    base: Model | None = None  # of an adapter, the model it belongs to

    @property
    def label(self) -> str:
        """A short name for tables and files."""
        return Path(self.source).resolve().name if self.local else self.source.split("/")[-1]


def is_model(folder: Path) -> bool:
    """Whether a folder holds a model or an adapter, rather than results or nothing."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER))


def find_model(name: str, *, adapters: bool = False) -> Model:
    """The model called ``name``, checked as far as possible without loading it; an adapter only with ``adapters``."""
    folder = Path(name).expanduser()
    _refuse_mixture(folder)
    if adapters and (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        base = read_json(folder / ADAPTER).get("base_model_name_or_path")
        if not base:
            raise ConfigError(
                f"The adapter {name!r} does not name its base model: merge it and give the merged folder."
            )
        return Model(name, str(folder), base=find_model(str(base)))
    if folder.is_dir():
        _check_folder(folder)
        return Model(name, str(folder))
    if folder.exists():
        raise ConfigError(f"{name!r} is a file. Give the model's folder, or a hub id such as owner/name.")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(
            f"The model folder {name!r} does not exist. Give an existing folder, or a hub id (owner/name)."
        )
    from huggingface_hub import hf_hub_download

    try:
        path = Path(hf_hub_download(name, "config.json"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name!r} is neither a folder here nor a model that the hub gave ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}). Check the name, the connection, and access to gated models."
        ) from error
    return Model(name, name, path.parent.name, local=False)


def identity(model: Model) -> str:
    """``sha256:…`` of a folder's contents, or ``hub:owner/name@commit``; for an adapter, that of its base first."""
    if model.base is not None:
        return f"{identity(model.base)} + {identity(replace(model, base=None))}"
    if not model.local:
        return f"hub:{model.source}@{model.revision}"
    total = hashlib.sha256()
    for path in sorted(Path(model.source).iterdir()):
        if path.is_file() and path.suffix in HASHED:
            total.update(f"{path.name}\0{digest(path).removeprefix('sha256:')}\n".encode())
    return f"sha256:{total.hexdigest()}"


def _refuse_mixture(folder: Path) -> None:
    """Of a model and an adapter in one folder transformers would load the one on top of the other's base."""
    names = [path.name for path in weight_files(folder)]
    whole = [name for name in names if not name.startswith("adapter_")]
    both = len(whole) not in (0, len(names)) or (folder / "config.json").is_file()
    if (folder / ADAPTER).is_file() and both:
        raise ConfigError(
            f"The folder {str(folder)!r} holds an adapter ({ADAPTER}) and a whole model "
            f"({(*whole, 'config.json')[0]}), perhaps of two runs: move one of them elsewhere."
        )


def of_other_weights(recorded: Mapping[str, str] | None, folder: Path) -> str | None:
    """Why results that were made for the weights ``recorded`` (file → digest) are not those of ``folder``'s model.

    None where they are, and where nothing tells: nothing was recorded, or the folder holds no weights any more.
    """
    now = weight_digests(folder) if recorded and isinstance(recorded, Mapping) else {}
    if not recorded or not now or now == recorded:
        return None
    changed = sorted(name for name in {*now, *recorded} if now.get(name) != recorded.get(name))
    return f"other weights lie in {folder} now ({', '.join(changed[:3])} changed since): evaluate its model again"


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        adapter = "It holds an adapter: merge it into its base model first."
        hint = adapter if (folder / ADAPTER).is_file() else "Is it a model folder?"
        raise ConfigError(f"The model folder {str(folder)!r} has no config.json. {hint}")
    weights = {path.name for path in folder.glob("*.safetensors")}
    if not weights:
        raise ConfigError(
            f"The model folder {str(folder)!r} has no *.safetensors file, the only weight format read here. "
            "Save the model with save_pretrained."
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file() and (missing := sorted({*read_json(index)["weight_map"].values()} - weights)):
        raise ConfigError(f"The model folder {str(folder)!r} lacks {len(missing)} of its shards, first {missing[0]}.")
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise ConfigError(
            f"The model folder {str(folder)!r} has no tokenizer ({', '.join(TOKENIZER_FILES[:2])}, …). "
            "Copy the base model's tokenizer files into it, or save it with tokenizer.save_pretrained."
        )


def loaded_identity(model: Any, tokenizer: Any) -> str:
    """SHA-256 of a loaded model's weights, configurations and tokenizer.

    Its folder would not do: a run writes reports and results into it, and an adapter is merged in memory.
    """
    import torch

    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    generation = model.generation_config.to_diff_dict() if model.generation_config is not None else {}
    settings = [
        {key: value for key, value in config.items() if key not in WITHOUT_EFFECT}
        for config in (model.config.to_dict(), generation)
    ]
    marks = (tokenizer.chat_template, tokenizer.pad_token_id, tokenizer.eos_token_id)
    for part in (settings, _rules(tokenizer), marks):
        total.update(json.dumps(part, sort_keys=True, default=str).encode())
    return f"sha256:{total.hexdigest()}"


def _rules(tokenizer: Any) -> Any:
    """How the tokenizer splits text; its vocabulary where its rules cannot be read."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return sorted(tokenizer.get_vocab().items())
    return {key: value for key, value in json.loads(backend.to_str()).items() if key not in PER_CALL}
