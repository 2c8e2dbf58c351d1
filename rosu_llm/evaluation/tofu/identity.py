"""Which model in memory this is, and with which libraries it was measured.

The files of a model's folder do not tell: a run writes reports and results into it, and an adapter is merged in memory.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

LIBRARIES = ("torch", "transformers", "tokenizers", "rouge-score", "scikit-learn", "scipy")
NO_PART = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")
PASSING = ("truncation", "padding")  # of a tokenizer: set anew by every call


def model_identity(model: Any, tokenizer: Any) -> str:
    """SHA-256 of weights, configurations and tokenizer: results are reused for this model and for nothing else."""
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    generation = model.generation_config.to_diff_dict() if model.generation_config is not None else {}
    settings = [
        {key: value for key, value in config.items() if key not in NO_PART}
        for config in (model.config.to_dict(), generation)
    ]
    marks = (tokenizer.chat_template, tokenizer.pad_token_id, tokenizer.eos_token_id)
    for part in (settings, _rules(tokenizer), marks):
        total.update(json.dumps(part, sort_keys=True, default=str).encode())
    return f"sha256:{total.hexdigest()}"


def _rules(tokenizer: Any) -> Any:
    """How the tokenizer cuts text; of one that does not tell, its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return sorted(tokenizer.get_vocab().items())
    return {key: value for key, value in json.loads(backend.to_str()).items() if key not in PASSING}


def versions() -> dict[str, str]:
    """The libraries that take part."""
    from ... import __version__

    found = {"rosu-llm": __version__}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found
