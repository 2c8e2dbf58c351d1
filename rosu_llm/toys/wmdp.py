"""``rosu eval wmdp … --smoke``: the whole evaluation on toy models and questions, in seconds, nothing downloaded."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

from ..evaluation.wmdp.data import TASKS
from ..evaluation.wmdp.run import Request, run

QUESTIONS = [
    {"question": f"Which is the number {'ABCD'[at % 4]}?", "choices": ["one", "two", "three", "four"], "answer": at % 4}
    for at in range(6)
]


def run_smoke(request: Request) -> Path | None:
    """Evaluate two toy models as ``request`` says; the record goes to a folder ``smoke`` inside its ``out``."""
    from ..experiments.demo.run import SMOKE
    from ..experiments.demo.world import build_world, small_llama

    world = build_world(0, people=SMOKE.people)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for seed, name in enumerate(("model", "base")):
            model = small_llama(len(world.tokenizer), seed, hidden=SMOKE.hidden, layers=SMOKE.layers)
            model.save_pretrained(folder / name)
            world.tokenizer.save_pretrained(folder / name)
        text = "".join(json.dumps(question) + "\n" for question in QUESTIONS)
        (folder / "mmlu").mkdir()
        for file in ("wmdp_bio.jsonl", "wmdp_cyber.jsonl", "mmlu/anatomy.test.jsonl", "mmlu/astronomy.test.jsonl"):
            (folder / file).write_text(text, encoding="utf-8")
        toy = dataclasses.replace(
            request,
            model=str(folder / "model"),
            base=str(folder / "base") if request.base else None,
            settings=dataclasses.replace(request.settings, tasks=TASKS, device="cpu", dtype="float32"),
            data_dir=folder,
            tasks_dir=None,
            processes=None,
            out=request.out / "smoke",
            cache=folder / "cache",
            name="toy",
            fresh=True,
        )
        (toy.out / "wmdp_toy.json").unlink(missing_ok=True)  # of an earlier toy
        return run(toy)
