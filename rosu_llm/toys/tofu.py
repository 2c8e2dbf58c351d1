"""``rosu eval tofu … --smoke``: the whole evaluation on toy models and questions, in seconds, nothing downloaded."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.people import Item
from ..data.tofu import split_names
from ..evaluation.tofu.loading import Loading
from ..evaluation.tofu.models import Request, run

QUESTIONS = 4


def run_smoke(request: Request) -> str:
    """Evaluate toy models as ``request`` says; the results go to ``smoke`` in its ``out``, else in ``outputs``."""
    from ..experiments.demo.run import SMOKE
    from ..experiments.demo.world import build_world, small_llama

    world = build_world(0, people=SMOKE.people)
    out = (request.out or Path("outputs")) / "smoke"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for seed, name in enumerate(("model", "retain", "target")):
            model = small_llama(len(world.tokenizer), seed, hidden=SMOKE.hidden, layers=SMOKE.layers)
            model.save_pretrained(folder / name)
            world.tokenizer.save_pretrained(folder / name)
        write_toy_data(folder, request.settings.forget_split, world.corpus.items)
        toy = dataclasses.replace(
            request,
            model=str(folder / "model"),
            retain=str(folder / "retain") if request.retain else None,
            target=str(folder / "target") if request.target else None,
            settings=dataclasses.replace(
                request.settings,
                data=str(folder),
                chat_format="Llama-2-7b-hf",
                max_new_tokens=5,
                fluency_model=None,
                limit=None,
            ),
            loading=Loading(dtype="float32"),
            out=out,
            overwrite=True,
            processes=None,
        )
        return run(toy)


def write_toy_data(folder: Path, forget_split: str, items: dict[str, list[Item]]) -> None:
    """A file for each configuration that TOFU has, with a few invented people in it."""
    splits = split_names(forget_split)
    parts = {
        splits.forget: items["forget"],
        splits.forget_perturbed: items["forget"],
        splits.holdout: items["holdout"],
        splits.retain_perturbed: items["retain"],
        splits.real_authors: items["retain"][QUESTIONS:],
        splits.world_facts: items["retain"][2 * QUESTIONS :],
    }
    for name, people in parts.items():
        (folder / f"{name}.json").write_text(json.dumps(_rows(people[:QUESTIONS])), encoding="utf-8")


def _rows(items: Sequence[Item]) -> list[dict[str, Any]]:
    return [
        {
            "question": item.question,
            "answer": item.answer,
            "paraphrased_answer": item.paraphrased_answer,
            "perturbed_answer": list(item.perturbed_answers),
        }
        for item in items
    ]
