"""``--smoke`` of a configuration: the same settings on a toy checkpoint and toy files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..experiments.demo.run import SMOKE
from ..experiments.demo.world import build_world, small_llama
from ..experiments.settings import FORCED
from ..recipes.settings import build
from ..representation.config import RepresentationConfig
from .train import REPLACED


def toy_values(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings with the model and the data replaced by toys, which are written below ``folder``."""
    arguments, config = build({**values, **REPLACED, **FORCED})
    hidden = isinstance(config, RepresentationConfig)
    layers = config.target_layer + 2 if isinstance(config, RepresentationConfig) else SMOKE.layers
    toys = folder / f"toy-{layers}-layers"
    if not toys.is_dir():
        partial = toys.with_name(f"{toys.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        _write(partial, layers)
        os.replace(partial, toys)
    count = len(arguments.forget_data) if isinstance(arguments.forget_data, list) else 0
    forget = str(toys / "forget.jsonl")
    return {
        **values,
        **REPLACED,
        "model_name_or_path": str(toys / "model"),
        "forget_data": [forget] * count or forget,
        "retain_data": str(toys / "retain.jsonl"),
        "holdout_data": None if hidden else str(toys / "holdout.jsonl"),
        "question_key": "question",
        "answer_key": "answer",
        "text_key": "text",
        "min_length": 0,
        "dtype": "float32",
        "attn_implementation": None,
    }


def _write(folder: Path, layers: int) -> None:
    world = build_world(0, people=SMOKE.people)
    small_llama(len(world.tokenizer), 0, hidden=SMOKE.hidden, layers=layers).save_pretrained(folder / "model")
    world.tokenizer.save_pretrained(folder / "model")
    for split in ("forget", "retain", "holdout"):
        rows = [{"question": i.question, "answer": i.answer, "text": i.answer} for i in world.corpus.items[split]]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
