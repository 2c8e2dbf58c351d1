"""Pairs of forget and retain images for the trainer: row numbers from the data set, pixels and augmentation in batches.

Which images an item holds, and how each is cropped and flipped, is a function of (seed, epoch, item) alone: no random
state is consumed, so that a resumed run, another number of workers or of processes sees the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..data.pairing import Deck, Epoch
from ..errors import ConfigError, DataError
from ..losses.classification import BESIDE
from ..losses.reference import ROWS
from .images import Images

#: Pixels by which a training image is shifted at most, in each direction.
SHIFT = 4

#: An image of a batch: its row number, and a number that decides about its augmentation; None leaves it as it is.
Item = tuple[int, int | None]


class ImagePairs(Epoch, Dataset[dict[str, list[Item]]]):
    """One item per ``retain_each`` retain images, with ``forget_each`` forget images beside them.

    An epoch goes once over the retain images (the paper's: its minutes for FT and ROSU agree with nothing else); forget
    images are taken from shuffled decks, one after the other.

    Args:
        forget, retain: row numbers; without ``forget`` items have none (training and retraining).
        augment: crop and flip.
        seed: of decks and augmentation.
    """

    def __init__(
        self,
        forget: Tensor | None,
        retain: Tensor,
        *,
        forget_each: int = 1,
        retain_each: int = 1,
        augment: bool = True,
        seed: int = 0,
    ) -> None:
        for name, part in (("forget", forget), ("retain", retain)):
            if part is not None and len(part) == 0:
                raise DataError(f"The {name} split is empty: unlearning needs images of both kinds.")
        super().__init__()
        self._rows = {"retain": retain} | ({} if forget is None else {"forget": forget})
        self._each = {"forget": forget_each, "retain": retain_each}
        self._decks = {name: Deck(len(rows), 2 * seed + (name == "retain")) for name, rows in self._rows.items()}
        self._augment, self._seed = augment, seed

    @property
    def forgotten(self) -> PlainImages:
        """Every forget image once, as it is."""
        return PlainImages(self._rows["forget"])

    def __len__(self) -> int:
        return -(-len(self._rows["retain"]) // self._each["retain"])

    def __getitem__(self, index: int) -> dict[str, list[Item]]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} pairs")
        place = self.epoch * len(self) + index % len(self)
        item: dict[str, list[Item]] = {}
        for name, rows in self._rows.items():
            each, deck = self._each[name], self._decks[name]
            positions = range(place * each, (place + 1) * each)
            item[name] = [(int(rows[deck[at]]), self._number(name, at) if self._augment else None) for at in positions]
        return item

    def _number(self, name: str, position: int) -> int:
        """Differs between the parts: images at the same position of both are not cropped and flipped alike."""
        return (self._seed << 40) ^ ((name == "forget") << 39) ^ position


class PlainImages(Dataset[Item]):
    """Images as they are, by number."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Item:
        return int(self._rows[index]), None


def batch_ratio(forget_batch: int, retain_batch: int) -> tuple[int, int, int]:
    """Items per batch, and forget and retain images per item, for batches of these sizes."""
    small, large = sorted((forget_batch, retain_batch))
    if small < 1 or large % small:
        raise ConfigError(
            f"forget_batch_size={forget_batch} and retain_batch_size={retain_batch}: one must be a multiple of the "
            "other, e.g. 128 and 512."
        )
    return small, forget_batch // small, retain_batch // small


@dataclass(frozen=True)
class ImageCollator:
    """Items → batches of ``pixel_values`` and ``labels``, augmented and normalised.

    Args:
        images: the training images.
        mean, std: per channel, of pixels from 0 to 1.
        joint: each part of a pair carries the other's images beside its own, for BatchNorm over both.
        channels_last: the order of memory in which convolutions are fastest; models that call ``view`` need the usual.
    """

    images: Images
    mean: tuple[float, ...]
    std: tuple[float, ...]
    joint: bool = False
    channels_last: bool = False

    def __call__(self, items: Sequence[Any]) -> dict[str, Any]:
        if not items:
            raise DataError("An empty list of images cannot be collated.")
        if not isinstance(items[0], Mapping):
            return self._batch(items)
        parts = {name: self._batch([own for item in items for own in item[name]]) for name in items[0]}
        if self.joint and len(parts) == 2:
            values = {name: part["pixel_values"] for name, part in parts.items()}
            for name, other in (("forget", "retain"), ("retain", "forget")):
                parts[name][BESIDE] = values[other]
        return parts

    def _batch(self, items: Sequence[Item]) -> dict[str, Tensor]:
        rows = torch.tensor([row for row, _ in items])
        pixels = self.images.pixels[rows]
        numbers = [number for _, number in items]
        if any(number is not None for number in numbers):
            pixels = shifted_and_flipped(pixels, numbers)
        values = normalised(pixels, self.mean, self.std)
        if self.channels_last:
            values = values.contiguous(memory_format=torch.channels_last)
        return {"pixel_values": values, "labels": self.images.labels[rows], ROWS: rows}


def normalised(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x/255 − mean)/std per channel, in float32."""
    shape = (1, -1, 1, 1)
    return (pixels.float() / 255.0 - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)


def channel_statistics(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of pixels from 0 to 1; from counts of the 256 values, exactly."""
    values = torch.arange(256, dtype=torch.float64) / 255.0
    counted = torch.zeros(pixels.shape[1], 256, dtype=torch.float64)
    for some in pixels.split(4096):  # bincount takes eight bytes per pixel
        for channel, counts in enumerate(counted):
            counts += torch.bincount(some[:, channel].flatten().to(torch.int64), minlength=256)
    means, stds = [], []
    for counts in counted:
        share = counts / counts.sum()
        mean = float(share @ values)
        means.append(mean)
        stds.append(max(float(share @ (values - mean).square()) ** 0.5, 1e-8))
    return tuple(means), tuple(stds)


def shifted_and_flipped(pixels: Tensor, numbers: Sequence[int | None]) -> Tensor:
    """Each image cropped from its black-padded self at one of 81 places, and mirrored or not; None leaves it alone."""
    mixed = [_mix(number) if number is not None else None for number in numbers]
    steps = 2 * SHIFT + 1
    places = [(SHIFT, SHIFT, 0) if m is None else (m % steps, (m >> 16) % steps, (m >> 32) & 1) for m in mixed]
    down, right, flip = torch.tensor(places).unbind(1)
    height, width = pixels.shape[-2:]
    padded = torch.nn.functional.pad(pixels, (SHIFT,) * 4)
    rows = down[:, None] + torch.arange(height)
    columns = torch.arange(width).expand(len(pixels), width)
    columns = right[:, None] + torch.where(flip[:, None] == 1, width - 1 - columns, columns)
    index = torch.arange(len(pixels))[:, None, None]
    # advanced indices on both sides of the channels put these last
    return padded[index, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _mix(number: int) -> int:
    """64 well-mixed bits of a number (the finalizer of SplitMix64)."""
    mask = (1 << 64) - 1
    z = (number * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
