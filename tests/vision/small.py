"""A small CNN with BatchNorm that computes in the type of its weights, and a few images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

from rosu_llm.vision.batches import ImageCollator, ImagePairs, PlainImages, batch_ratio
from rosu_llm.vision.images import Images
from rosu_llm.vision.settings import VisionConfig
from rosu_llm.vision.trainer import VisionTrainer

CLASSES = 4
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


class SmallCNN(nn.Module):
    """Convolution, BatchNorm, tanh, head: smooth, so that finite steps compare well."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, CLASSES)
        with torch.no_grad():
            self.norm.running_mean.copy_(torch.randn(5) * 0.1)
            self.norm.running_var.copy_(torch.rand(5) + 0.5)

    def forward(self, pixel_values: Tensor) -> Any:
        x = torch.tanh(self.norm(self.conv(pixel_values.to(self.conv.weight.dtype))))
        return ImageClassifierOutput(logits=self.head(x[:, :, ::2].mean((2, 3))))


def images(count: int = 48, seed: int = 0, side: int = 6) -> Images:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 3, side, side), generator=generator).to(torch.uint8)
    return Images(pixels, torch.arange(count) % CLASSES, tuple("abcd"))


def trainer(model: nn.Module, folder: Any, *, forget: int = 8, retain: int = 8, **settings: Any) -> VisionTrainer:
    """Unlearn rows 0–15 of the images, keep the others; the last eight stand for unseen ones."""
    items, forget_each, retain_each = batch_ratio(forget, retain)
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": items,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_steps": 3,
        "learning_rate": 0.1,
        "rho": 0.3,
    }
    config = VisionConfig(**{**defaults, **settings})
    rows = torch.arange(48)
    pairs = ImagePairs(rows[:16], rows[16:], forget_each=forget_each, retain_each=retain_each, augment=True)
    collator = ImageCollator(images(), MEAN, STD, joint=config.batch_norm == "joint")
    held = PlainImages(rows[40:]) if config.forget_until == "holdout" else None
    return VisionTrainer(model, config, train_dataset=pairs, data_collator=collator, holdout_dataset=held)
