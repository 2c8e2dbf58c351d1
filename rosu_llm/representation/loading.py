"""Load only the layers up to ℓ of a checkpoint.

The representation losses read layer ℓ, so nothing above it matters. The model is built from a shortened
configuration without storage, and the tensors it names are read straight into place: the peak is the bytes
of the layers kept and one mapped file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, DataError
from .files import CheckpointFiles, stored_dtype
from .names import check_target, layer_stack, text_config, trainable_names

#: What a copy of the model needs from the hub.
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken"]


@dataclass(frozen=True)
class Truncated:
    """The lower part of a model.

    Attributes:
        model: without head, layers 0…ℓ, frozen but for the trained parameters.
        stack: name of the module list of its layers.
        files: the checkpoint it came from.
        stored: for each trained parameter of the model, its name in the checkpoint.
    """

    model: Any
    stack: str
    files: CheckpointFiles
    stored: dict[str, str]


def resolve_folder(name: str) -> Path:
    """A local model folder: the given one, or a snapshot from the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model_name_or_path={name!r} is neither a folder nor a model that could be fetched from the hub. {reason}"
        ) from error


def load_truncated(
    name: str,
    *,
    target_layer: int,
    trainable_parameters: str,
    dtype: torch.dtype = torch.float32,
    layer_stack_name: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Truncated:
    """Layers 0…ℓ of the checkpoint ``name``; frozen weights as ``dtype``, trained ones in float32."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModel

    folder = resolve_folder(name)
    files = CheckpointFiles(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(folder)!r} has no usable config.json: {' '.join(str(error).split())[:300]}") from error
    layers = int(text_config(config).num_hidden_layers)
    check_target(target_layer, layers)
    extra: dict[str, Any] = {"attn_implementation": attn_implementation} if attn_implementation else {}
    # Constants that are no parameters (embedding scales) are made in this type, as from_pretrained makes them.
    extra["dtype" if hasattr(type(config), "dtype") else "torch_dtype"] = dtype
    with init_empty_weights(include_buffers=False):
        model = AutoModel.from_config(shortened(config, target_layer + 1), trust_remote_code=trust_remote_code, **extra)
    stack = layer_stack(model, layer_stack_name)
    names = _stored_names(model, files)
    prefix = names[next(iter(names))].removesuffix(next(iter(names)))
    chosen = trainable_names(files.entries, trainable_parameters, prefix + stack, target_layer)
    back = {theirs: ours for ours, theirs in names.items()}
    foreign = [n for n in chosen if n not in back]
    if foreign:
        raise ConfigError(
            f"trainable_parameters={trainable_parameters!r} also matches {', '.join(foreign[:3])}, which the "
            "checkpoint holds but the model does not use: make it narrower."
        )
    stored = {back[n]: n for n in chosen}
    _fill(model, files, names, set(stored), dtype)
    model.eval()
    return Truncated(model, stack, files, stored)


def shortened(config: Any, layers: int) -> Any:
    """The configuration with fewer layers; lists with one entry per layer are cut to match."""
    values = config.to_dict()
    inner = next((k for k in ("text_config",) if isinstance(values.get(k), dict)), None)
    part = values if inner is None else values[inner]
    full = part["num_hidden_layers"]
    for key, value in part.items():
        if isinstance(value, list) and len(value) == full and full != layers:
            part[key] = value[:layers]
    part["num_hidden_layers"] = layers
    return type(config).from_dict(values)


def _stored_names(model: Any, files: CheckpointFiles) -> dict[str, str]:
    """For each parameter or saved buffer of the model, the name of its tensor in the checkpoint."""
    ours = list(model.state_dict())
    for prefix in ("", f"{model.base_model_prefix}.", "model.language_model.", "language_model.model."):
        if all(prefix + name in files.entries for name in ours):
            return {name: prefix + name for name in ours}
    missing = [name for name in ours if not any(stored.endswith(name) for stored in files.entries)] or ours
    raise DataError(
        f"{files.folder} does not hold the tensors that {type(model).__name__} needs: {', '.join(missing[:3])}"
        f"{', …' if len(missing) > 3 else ''}. It is incomplete, or stored under other names: use path: plain."
    )


def _fill(
    model: nn.Module, files: CheckpointFiles, names: dict[str, str], trained: set[str], dtype: torch.dtype
) -> None:
    back = {theirs: ours for ours, theirs in names.items()}
    for stored, tensor in files.tensors(names.values()):
        name = back[stored]
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        if leaf in owner._parameters:
            stored_dtype(files.entries[stored])
            value = tensor.to(torch.float32 if name in trained else dtype, copy=True)
            owner._parameters[leaf] = nn.Parameter(value, requires_grad=name in trained)
        else:
            owner._buffers[leaf] = tensor.clone()
