"""A model to evaluate, from a folder or the hub: whole, or as an adapter that is merged into its base in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ...compat import dtype_argument
from ...errors import ConfigError
from ...files import read_json
from ..model_identity import TOKENIZER_FILES, Model, find_model, identity

ADAPTER = "adapter_config.json"


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How weights are loaded: precision (``auto``: as stored), attention, whether code of the model may run."""

    dtype: str = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Source:
    """A model that is there; ``base`` is what an adapter belongs to."""

    name: str
    base: str | None = None

    @property
    def key(self) -> str:
        """What its files contain, so that another model under the same name is told from it."""
        parts = [find_model(self.base or self.name)]
        parts += [Model(self.name, self.name)] if self.base else []
        return " + ".join(map(identity, parts))


def find_source(name: str) -> Source:
    """Check, without loading, that ``name`` is a model or an adapter."""
    folder = Path(name).expanduser()
    if not (folder / ADAPTER).is_file() or (folder / "config.json").is_file():
        return Source(find_model(name).source)
    base = read_json(folder / ADAPTER).get("base_model_name_or_path")
    if not base:
        raise ConfigError(f"The adapter {name!r} does not name its base model: merge it and give the merged folder.")
    return Source(str(folder), find_model(str(base)).source)


def load_tokenizer(source: Source, how: Loading) -> Any:
    """The tokenizer, of an adapter without one its base's."""
    from transformers import AutoTokenizer

    name = source.name
    if source.base is not None and not any((Path(name) / file).is_file() for file in TOKENIZER_FILES):
        name = source.base
    return AutoTokenizer.from_pretrained(name, trust_remote_code=how.trust_remote_code)


def load(source: Source, how: Loading, device: torch.device) -> tuple[Any, Any]:
    """The model on ``device`` and its tokenizer."""
    tokenizer = load_tokenizer(source, how)
    try:
        model = _load_model(source, how)
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"The model {source.name!r} cannot be loaded: {reason[0]}") from error
    return model.to(device).eval(), tokenizer


def _load_model(source: Source, how: Loading) -> Any:
    from transformers import AutoModelForCausalLM

    dtype: Any = how.dtype if how.dtype == "auto" else getattr(torch, how.dtype)
    options = {**dtype_argument(dtype), "trust_remote_code": how.trust_remote_code}
    if how.attn_implementation:
        options["attn_implementation"] = how.attn_implementation
    model = AutoModelForCausalLM.from_pretrained(source.base or source.name, **options)
    if source.base is not None:
        try:
            from peft import PeftModel
        except ImportError as error:
            raise ConfigError(f"{source.name!r} is an adapter, which needs PEFT: pip install peft.") from error
        return PeftModel.from_pretrained(model, source.name).merge_and_unload()
    return model
