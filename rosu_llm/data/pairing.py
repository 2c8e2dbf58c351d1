"""Pairs of forget and retain samples: deterministic, evenly covering, resumable.

Which retain samples accompany forget sample i in epoch e is a function of (seed, e, i) alone: no
random state is consumed, so a resumed run, another number of workers or another rank order sees the
same pairs. Over time every retain sample is drawn equally often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Dataset

from ..errors import DataError
from .mismatch import mismatched

Sample = Mapping[str, Any]
Samples = Sequence[Sample] | Any


class Deck:
    """An endless sequence of numbers below ``size``: shuffled decks, one after the other, indexed by position."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        self._block: int | None = None
        self._order: list[int] = []

    def __getitem__(self, position: int) -> int:
        block, offset = divmod(position, self._size)
        if block != self._block:
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + block) & 0x7FFF_FFFF_FFFF_FFFF)
            self._order = torch.randperm(self._size, generator=generator).tolist()
            self._block = block
        return self._order[offset]


class Epoch:
    """The number of an epoch, in memory that the workers of a data loader share, also those that outlive an epoch."""

    #: Trainers ask for it where workers are persistent.
    shares_epoch = True

    def __init__(self) -> None:
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer at the beginning of every epoch."""
        self._epoch.fill_(epoch)


class ForgetRetainDataset(Epoch, Dataset[dict[str, Any]]):
    """One item per forget sample, with ``retain_per_forget`` retain samples beside it.

    Args:
        forget, retain: indexable collections of tokenised samples (``input_ids``, ``labels``).
        retain_per_forget: how much larger the retain part of a batch is.
        seed: of the pairing.
        mismatch: also give each forget question the answer of a retain sample, for ``method="llmu"``.

    Items are ``{"forget": sample, "retain": [sample, …]}``, with ``"mismatch": sample`` where asked for.
    """

    def __init__(
        self, forget: Samples, retain: Samples, *, retain_per_forget: int = 1, seed: int = 0, mismatch: bool = False
    ) -> None:
        for name, part in (("forget", forget), ("retain", retain)):
            if not isinstance(part, Sized) or len(part) == 0:
                raise DataError(f"The {name} data set is empty: unlearning needs samples of both kinds.")
        if retain_per_forget < 1:
            raise DataError(f"retain_per_forget={retain_per_forget} must be at least 1.")
        self.forget, self.retain = forget, retain
        self.retain_per_forget, self.seed, self.mismatch = retain_per_forget, seed, mismatch
        super().__init__()
        self._answers = Deck(len(retain), seed + 1)
        self._deck = Deck(len(retain), seed)

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer at the beginning of every epoch; forget samples whose third answer changes are told."""
        super().set_epoch(epoch)
        if hasattr(self.forget, "set_epoch"):
            self.forget.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.forget)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} forget samples")
        index %= len(self)
        item = {"forget": self.forget[index], "retain": [self.retain[j] for j in self.partners(index)]}
        if self.mismatch:
            other = self.retain[self._answers[self.epoch * len(self) + index]]
            item["mismatch"] = mismatched(self.forget[index], other)
        return item

    def partners(self, index: int) -> list[int]:
        """Indices of the retain samples that go with forget sample ``index`` in this epoch."""
        first = (self.epoch * len(self.forget) + index) * self.retain_per_forget
        return [self._deck[first + j] for j in range(self.retain_per_forget)]


class ForgetRetainCollator:
    """Pads the two parts of a batch, each to its own longest sample; plain samples become a plain batch.

    Args:
        pad_token_id: what to fill ``input_ids`` with; masked out of attention and labels.
        max_length: longer samples are cut from the right; None keeps them.
    """

    def __init__(self, pad_token_id: int = 0, max_length: int | None = None) -> None:
        self.pad_token_id, self.max_length = pad_token_id, max_length

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not items:
            raise DataError("An empty list of samples cannot be collated.")
        if "forget" not in items[0] and "retain" not in items[0]:
            return self._pad(items)
        parts: dict[str, list[Sample]] = {"forget": [], "retain": [], "mismatch": []}
        for item in items:
            for name, bucket in parts.items():
                value = item.get(name, [])
                bucket.extend([value] if isinstance(value, Mapping) else value)
        return {name: self._pad(bucket) for name, bucket in parts.items() if bucket}

    def _pad(self, samples: Sequence[Sample]) -> dict[str, Any]:
        rows = [torch.as_tensor(s["input_ids"])[: self.max_length] for s in samples]
        labels = [torch.as_tensor(s.get("labels", s["input_ids"]))[: self.max_length] for s in samples]
        width = max(len(row) for row in rows)
        batch: dict[str, Any] = {
            "input_ids": torch.full((len(rows), width), self.pad_token_id, dtype=torch.long),
            "attention_mask": torch.zeros((len(rows), width), dtype=torch.long),
            "labels": torch.full((len(rows), width), -100, dtype=torch.long),
        }
        for i, (row, label) in enumerate(zip(rows, labels, strict=True)):
            batch["input_ids"][i, : len(row)] = row
            mask = samples[i].get("attention_mask")
            batch["attention_mask"][i, : len(row)] = 1 if mask is None else torch.as_tensor(mask)[: len(row)]
            batch["labels"][i, : len(label)] = label
        if isinstance(samples[0].get("alternate"), Mapping):  # another answer to the same question
            batch["alternate"] = self._pad([s["alternate"] for s in samples])
        if "corpus" in samples[0]:
            batch["corpus"] = torch.tensor([int(s["corpus"]) for s in samples])
        for name in samples[0]:
            if name not in batch and hasattr(samples[0][name], "shape"):
                batch[name] = _joined(name, [torch.as_tensor(s[name]) for s in samples], [len(r) for r in rows], width)
        return batch


def _joined(name: str, values: Sequence[torch.Tensor], lengths: Sequence[int], width: int) -> torch.Tensor:
    """Further tensors of the samples, such as images or token types: one per token padded, others stacked or joined."""
    if all(value.dim() == 1 and len(value) == length for value, length in zip(values, lengths, strict=True)):
        return torch.stack([torch.nn.functional.pad(value, (0, width - len(value))) for value in values])
    if len({value.shape for value in values}) == 1:
        return torch.stack(list(values))
    if len({value.shape[1:] for value in values}) == 1 and values[0].dim() > 1:
        return torch.cat(list(values))  # patches of images of different size
    raise DataError(f"The samples' {name} have shapes that cannot be batched: use a data_collator of your own.")
