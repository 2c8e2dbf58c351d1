"""A model of a few thousand weights and a folder like TOFU's, for whole runs in a second or two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rosu_llm.data.people import generate
from rosu_llm.experiments.demo.world import word_tokenizer
from tests.models import tiny_llama

FORM = "Llama-2-7b-hf"  # Question: … Answer: …


class World:
    """A tiny model and a folder like TOFU's, one configuration per file, and the tokenizer of both."""

    def __init__(self, folder: Path) -> None:
        corpus = generate(0, forget=1, retain=1, calibration=1, holdout=1)
        self.tokenizer = word_tokenizer(["Question:", "Answer:", *corpus.words()])
        self.model, self.data = str(folder / "model"), folder / "tofu"
        self.tokenizer.save_pretrained(self.model)
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        tiny_llama(seed=1, vocab_size=len(self.tokenizer), **special).save_pretrained(self.model)
        self.data.mkdir()
        for name, split in (("full", "retain"), ("forget10", "forget")):
            rows = [{"question": item.question, "answer": item.answer} for item in corpus.items[split]][:5]
            (self.data / f"{name}.json").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def settings(self, out: Path, **changes: Any) -> dict[str, Any]:
        return {
            "method": "finetune",
            "model_name_or_path": self.model,
            "retain_data": f"{self.data}:full",
            "chat_format": FORM,
            "output_dir": str(out),
            "max_steps": 4,
            "save_steps": 2,
            "logging_steps": 1,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            **changes,
        }

    def flags(self, out: Path, **changes: Any) -> list[str]:
        """The same for the command line."""
        return [
            word
            for name, value in self.settings(out, **changes).items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
