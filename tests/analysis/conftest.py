"""Constructed models for audits: one that knows the forget set, one that never saw it, and some that pretend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rosu_llm.data.chat_format import FORMATS, encode_chat
from rosu_llm.data.pairing import ForgetRetainCollator
from rosu_llm.experiments.demo.world import build_world, learn, small_llama
from rosu_llm.losses import COUNT, answer_nll
from rosu_llm.toys import write_rows, write_toy_data

FORMAT = "Llama-2-7b-hf"
SPLIT = "forget01"


@dataclass(frozen=True)
class Audited:
    """Folders of models by name, and of TOFU's files; ``samples`` are what was learned, tokenised."""

    folder: Path
    tokenizer: Any
    samples: dict[str, list[dict[str, list[int]]]]

    def __getitem__(self, name: str) -> str:
        return str(self.folder / name)

    @property
    def data(self) -> str:
        return str(self.folder / "data")

    def save(self, name: str, model: Any) -> str:
        model.save_pretrained(self.folder / name)
        self.tokenizer.save_pretrained(self.folder / name)
        return self[name]

    def flags(self, out: Path, name: str, *more: str, retain: str | None = "retain") -> list[str]:
        control = ["--retain", self[retain]] if retain else []
        where = ["--data", self.data, "--forget-split", SPLIT, "--chat-format", FORMAT, "--out", str(out)]
        return [self[name], *control, "--target", self["initial"], *where, "--max-new-tokens", "12", *more]


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """``initial`` learned everything, ``retain`` all but the forget set, ``masked`` is initial after some ascent."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("audited")
    world = build_world(0, people={"forget": 2, "retain": 3, "calibration": 1, "holdout": 1})
    items = world.corpus.items
    write_toy_data(folder / "data", SPLIT, items)
    kept = items["retain"][:12]
    write_rows(folder / "data" / "retain99.jsonl", ({"question": i.question, "answer": i.answer} for i in kept))

    def encode(some: Any) -> list[dict[str, list[int]]]:
        found = [encode_chat(i.question, i.answer, world.tokenizer, FORMATS[FORMAT]) for i in some]
        return [{"input_ids": each.input_ids, "labels": each.labels} for each in found]

    samples = {"forget": encode(items["forget"][:4]), "retain": encode(kept)}
    made = Audited(folder, world.tokenizer, samples)
    for name, rows in (("retain", samples["retain"]), ("initial", [*samples["forget"], *samples["retain"]])):
        model = small_llama(len(world.tokenizer), 0, hidden=64, layers=2)
        learn(model, rows, epochs=60, seed=0, batch_size=8)
        made.save(name, model)
    batch = ForgetRetainCollator(0)(samples["forget"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(200):
        loss = answer_nll(model, batch).sum() / COUNT["token"](batch)
        if loss.item() > 2.0:
            break
        optimizer.zero_grad()
        (-loss).backward()
        optimizer.step()
    made.save("masked", model)
    return made
