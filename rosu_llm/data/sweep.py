"""Every sample of two sets once: the data of a method that sweeps them (``method="ssd"``)."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import Dataset

from ..errors import DataError
from .chat_format import IGNORE


class SweepDataset(Dataset[dict[str, Any]]):
    """Item i is sample i of either set; where a set has ended, a sample without labels, which counts for nothing.

    Args:
        forget, retain: indexable collections of tokenised samples.
        multiple: the length is rounded up to it (batch size × processes), so that no process repeats a sample.
    """

    def __init__(self, forget: Any, retain: Any, *, multiple: int = 1) -> None:
        for name, part in (("forget", forget), ("retain", retain)):
            if not isinstance(part, Sized) or len(part) == 0:
                raise DataError(f"The {name} data set is empty: a sweep needs samples of both kinds.")
        self.forget, self.retain = forget, retain
        longest = max(len(forget), len(retain))
        self._length = -(-longest // multiple) * multiple

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for a sweep of {len(self)}")
        index %= len(self)
        return {"forget": _sample(self.forget, index), "retain": _sample(self.retain, index)}


def _sample(samples: Any, index: int) -> Any:
    if index < len(samples):
        return samples[index]
    first = {name: value for name, value in samples[0].items() if name != "attention_mask"}
    tokens = list(first["input_ids"])[:2]
    return {**first, "input_ids": tokens, "labels": [IGNORE] * len(tokens)}
