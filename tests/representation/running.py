"""Train at representation level in a test: known windows, everything recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rosu_llm.representation.config import RepresentationConfig
from rosu_llm.representation.trainer import RepresentationTrainer
from rosu_llm.step import Outcome
from tests.models import FAMILIES, VOCABULARY

#: Trains layers 1 and 2 of a :func:`tests.models.tiny_decoder` and looks at layer 2 of its four.
LAYER, TRAINED = 2, (1, 2)


def pattern(family: str = "llama") -> str:
    return rf"layers\.(1|2)\.{FAMILIES[family][2].replace('.', chr(92) + '.')}\.weight$"


def parameter_names(family: str = "llama") -> list[str]:
    return [f"model.layers.{i}.{FAMILIES[family][2]}.weight" for i in TRAINED]


def documents(count: int, seed: int, *, shortest: int = 3, longest: int = 12) -> list[list[int]]:
    """Ragged random sequences."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(4, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


class Pairs(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Document i of the one with document i of the other, read in order."""

    def __init__(self, forget: Sequence[Any], retain: Sequence[Any], window: int) -> None:
        self.forget, self.retain, self.window = forget, retain, window

    def __len__(self) -> int:
        return len(self.forget)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"forget": {"input_ids": self.forget[i]}, "retain": {"input_ids": self.retain[i]}}


class Collator:
    """Pads on either side with the given token; keeps ``corpus`` where there is one."""

    def __init__(self, side: str = "right", pad: int = 0) -> None:
        self.side, self.pad = side, pad

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {part: self._pad([item[part] for item in items]) for part in ("forget", "retain")}

    def _pad(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        width = max(len(sample["input_ids"]) for sample in samples)
        ids, mask = [], []
        for sample in samples:
            row = list(sample["input_ids"])
            fill = width - len(row)
            left, right = (fill, 0) if self.side == "left" else (0, fill)
            ids.append([self.pad] * left + row + [self.pad] * right)
            mask.append([0] * left + [1] * len(row) + [0] * right)
        batch = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        if "corpus" in samples[0]:
            batch["corpus"] = torch.tensor([sample["corpus"] for sample in samples])
        return batch


class Recorder(RepresentationTrainer):
    """Keeps every step's outcome, gradients, θ and forget batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.outcomes: list[Outcome] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.path_of_theta: list[Tensor] = []
        self.windows: list[list[Mapping[str, Any]]] = []
        super().__init__(*args, **kwargs)

    def parameter_space(self) -> Any:
        space: Any = super().parameter_space()
        for method in ("capture", "hold"):
            original = getattr(space, method)

            def record(name: str, original: Any = original) -> None:
                self.gradients[-1][name] = torch.cat([p.grad.double().reshape(-1) for p in space.parameters])
                original(name)

            setattr(space, method, record)
        return space

    def _update(self, model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> Outcome:
        self.gradients.append({})
        self.path_of_theta.append(self.theta())
        self.windows.append(list(batches))
        self.outcomes.append(super()._update(model, batches))
        return self.outcomes[-1]

    def theta(self) -> Tensor:
        return torch.cat([p.detach().double().reshape(-1) for p in self._theta.values()])


def configuration(folder: Path, **settings: Any) -> RepresentationConfig:
    """SGD, no clipping, no decay: the paper's update to the letter."""
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "max_steps": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "weight_decay": 0.0,
        "optim": "sgd",
        "amplify": "direct",
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "target_layer": LAYER,
        "trainable_parameters": pattern(),
    }
    return RepresentationConfig(**{**defaults, **settings})


def build(
    model: Any, folder: Path, *, forget: Any = None, retain: Any = None, side: str = "right", pad: int = 0,
    options: Mapping[str, Any] | None = None, **settings: Any,
) -> Recorder:  # fmt: skip
    """A trainer over pairs in order; ``options`` are the trainer's own arguments."""
    config = configuration(folder, **settings)
    window = config.per_device_train_batch_size * config.gradient_accumulation_steps
    forget = documents(5 * window, 1) if forget is None else forget
    retain = documents(5 * window, 2) if retain is None else retain
    given = {"train_dataset": Pairs(forget, retain, window), "data_collator": Collator(side, pad), **(options or {})}
    return Recorder(model, config, **given)


def train(model: Any, folder: Path, **settings: Any) -> Recorder:
    trainer = build(model, folder, **settings)
    trainer.train()
    return trainer


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    return float((a.double() - b.double()).norm() / b.double().norm())
