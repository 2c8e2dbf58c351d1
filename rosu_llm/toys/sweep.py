"""``--smoke`` of a TOFU recipe: invented questions in TOFU's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..experiments.demo.run import SMOKE
from ..experiments.demo.world import build_world
from .tofu import write_toy_data

#: Settings of the evaluation of a toy.
TOY: dict[str, Any] = {"max_new_tokens": 5, "fluency_model": None, "limit": None}


def toy_tofu(folder: Path, split: str) -> dict[str, Any]:
    """Write the questions below ``folder``; returns the settings that point to them."""
    data = folder / "toy-tofu"
    data.mkdir(parents=True, exist_ok=True)
    write_toy_data(data, split, build_world(0, people=SMOKE.people).corpus.items)
    return {"forget_data": f"{data}:{split}", "chat_format": "Llama-2-7b-hf"}
