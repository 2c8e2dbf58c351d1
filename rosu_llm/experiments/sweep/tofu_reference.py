"""The models that trials are compared with: given by their results, or as models to be evaluated."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...evaluation.collection import find_reference
from ...evaluation.tofu.loading import ADAPTER, Loading, Source, find_source, load


@dataclass(frozen=True)
class Reference:
    """One of them.

    Attributes:
        key: tells its contents from others.
        file: its results, where they exist already; otherwise there is a
        source: the model.
    """

    key: str
    file: Path | None = None
    source: Source | None = None

    def load(self, values: Mapping[str, Any]) -> tuple[Any, Any]:
        """The model on its device, and its tokenizer, in the precision of the recipe ``values``."""
        from ...recipes.settings import build

        assert self.source is not None
        arguments, config = build({**values, "output_dir": "unused"})
        how = Loading(
            dtype=arguments.dtype,
            attn_implementation=arguments.attn_implementation,
            trust_remote_code=arguments.trust_remote_code,
        )
        return load(self.source, how, config.device)


def find(given: str, split: str) -> Reference:
    """``given`` is a result file, a model, or a folder with results of ``split``."""
    path = Path(given).expanduser()
    model = any((path / name).is_file() for name in ("config.json", ADAPTER))
    if path.is_file() or (path.is_dir() and not model):
        file = find_reference(path, split)
        return Reference(f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}", file)
    source = find_source(given)
    return Reference(source.key, source=source)
