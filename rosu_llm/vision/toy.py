"""Invented images for ``--smoke``: everything runs in seconds and means nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .images import Images

CLASSES, SIDE = 3, 8
#: Settings in place of those of the configuration.
SETTINGS: dict[str, Any] = {
    "data": "toy",
    "test_data": None,
    "model": "resnet18",
    "width": 2,
    "forget_class": None,
    "pretrain_epochs": 1,
    "pretrain_batch_size": 16,
    "forget_batch_size": 16,
    "retain_batch_size": 16,
    "validation_share": 0.1,
    "edit_images": 8,
    "num_train_epochs": 1,
    "bf16": False,
    "fp16": False,
    "use_cpu": True,
    "dataloader_num_workers": 0,
}


def toy_images(seed: int = 0) -> tuple[Images, Images]:
    """Training and test images: each class has a pattern, each image noise on it."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(0, 160, (CLASSES, 3, SIDE, SIDE), generator=generator)

    def draw(each: int) -> Images:
        labels = torch.arange(CLASSES).repeat_interleave(each)
        noise = torch.randint(0, 96, (len(labels), 3, SIDE, SIDE), generator=generator)
        return Images((patterns[labels] + noise).to(torch.uint8), labels, tuple("abc"))

    return draw(30), draw(10)


def toy_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration at toy size."""
    return {**values, **SETTINGS}
