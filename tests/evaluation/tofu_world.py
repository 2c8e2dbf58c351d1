"""Toy models and questions, for evaluations of seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rosu_llm import TofuSettings, evaluate_tofu
from rosu_llm.experiments.demo.world import SMOKE, build_world, small_llama
from rosu_llm.toys import write_toy_data


class World:
    """Toy models, their tokenizer, and toy questions in a folder."""

    def __init__(self, folder: Path) -> None:
        world = build_world(0, people=SMOKE.people)
        self.tokenizer, self.data = world.tokenizer, folder / "data"
        self.data.mkdir(parents=True)
        write_toy_data(self.data, "forget10", world.corpus.items)
        self.settings = TofuSettings(
            data=str(self.data), chat_format="Llama-2-7b-hf", max_new_tokens=3, fluency_model=None, batch_size=3
        )

    def model(self, seed: int = 0) -> Any:
        made = small_llama(len(self.tokenizer), seed, hidden=32, layers=1)
        made.config.tie_word_embeddings = False  # tied and untrained it would only repeat its input
        made.lm_head.weight = torch.nn.Parameter(torch.randn_like(made.lm_head.weight) * 0.3)
        return made

    def evaluate(self, out: Path, seed: int = 0, **options: Any) -> dict[str, float]:
        settings = options.pop("settings", self.settings)
        return evaluate_tofu(self.model(seed), self.tokenizer, settings, out, **options)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def edit(world: World, config: str, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    path = world.data / f"{config}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_classifier(world: World, folder: Path) -> Any:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=len(world.tokenizer), dim=16, n_heads=2, hidden_dim=32, n_layers=1, num_labels=4
    )
    classifier = DistilBertForSequenceClassification(config).eval()
    with torch.no_grad():
        for weights in classifier.parameters():
            weights.mul_(10)
    classifier.save_pretrained(folder)
    world.tokenizer.save_pretrained(folder)
    return classifier
