"""What losses need of the initial model, at the least cost.

NPO needs one number per sample: log π_ref(answer | question). It is computed once, before the first
step, and travels with the checkpoints, so there is no second model and a resumed run sees the same
reference. Samples are recognised by content, so any data set and collator will do. KL needs the
initial model's distributions at every step: with an adapter that is the same model with the adapter
switched off; otherwise hidden states that are kept (:mod:`rosu_llm.training.initial`), or a frozen copy.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..errors import DataError
from .language import IGNORE, answer_nll, logits_of
from .registry import Batch

Values = TypeVar("Values", bound="SampleValues")


#: The key under which a batch may hold the number of each row in its data set.
ROWS = "rows"


def sample_keys(batch: Batch) -> list[str]:
    """One key per row, from its unpadded tokens and labels; or its number in the data, where the batch has them."""
    if ROWS in batch:  # of images, which may be cropped and flipped at will
        return [f"{number:032x}" for number in batch[ROWS].tolist()]
    return [key for key, _ in keys_and_answers(batch)]


def keys_and_answers(batch: Batch) -> list[tuple[str, int]]:
    """The key of every row, and how many answer tokens it has."""
    ids, labels = batch["input_ids"], batch["labels"]
    mask = batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(ids)
    found = []
    for row in torch.stack([ids, labels, mask.bool()], 1).to(torch.int64).cpu():  # one copy, one wait
        content = row[:2, row[2].bool()].contiguous().numpy().tobytes()
        found.append((hashlib.blake2b(content, digest_size=16).hexdigest(), int((row[1, 1:] != IGNORE).sum())))
    return found


class SampleValues:
    """Numbers by sample, recognised by content: one each, or one for each of its answer tokens."""

    def __init__(self, values: Mapping[str, Sequence[float]] | None = None) -> None:
        self.values = {key: tuple(numbers) for key, numbers in (values or {}).items()}

    def know(self, batch: Batch) -> bool:
        """Whether every sample of the batch has a value."""
        return all(key in self.values for key in sample_keys(batch))

    def of(self, batch: Batch, what: str = "value") -> list[tuple[float, ...]]:
        """The numbers of every row; ``what`` they are is for the error where one has none."""
        keys = sample_keys(batch)
        missing = sum(key not in self.values for key in keys)
        if missing:
            raise DataError(
                f"{missing} of {len(keys)} forget samples have no {what}: the data set returned tokens it did not "
                "return when these were computed. Use data without random augmentation, or settings that need none "
                "(forget_loss nll or simnpo, forget_until off or a number)."
            )
        return [self.values[key] for key in keys]

    def save(self, path: Path) -> None:
        """Write a safetensors file: keys as bytes, values as float64, how many each sample has."""
        keys = torch.tensor([list(bytes.fromhex(k)) for k in self.values], dtype=torch.uint8).reshape(-1, 16)
        numbers = torch.tensor([x for own in self.values.values() for x in own], dtype=torch.float64)
        lengths = torch.tensor([len(own) for own in self.values.values()])
        save_file({"keys": keys, "values": numbers, "lengths": lengths}, str(path))

    @classmethod
    def load(cls: type[Values], path: Path) -> Values:
        """Read what :meth:`save` wrote."""
        data = load_file(str(path))
        keys = [bytes(row.tolist()).hex() for row in data["keys"]]
        lengths = data["lengths"].tolist() if "lengths" in data else [1] * len(keys)
        return cls(dict(zip(keys, map(Tensor.tolist, data["values"].split(lengths)), strict=True)))


class ReferenceLogProbs(SampleValues):
    """log π_ref per sample."""

    @torch.no_grad()
    def compute(self, model: nn.Module, batches: Iterable[Batch]) -> None:
        """Fill in every sample of ``batches`` under the weights the model has now, without dropout."""
        with evaluating(model):
            for batch in batches:
                logprobs = (-answer_nll(model, batch).sum(-1)).double().tolist()
                self.values.update({key: (value,) for key, value in zip(sample_keys(batch), logprobs, strict=True)})

    def __call__(self, batch: Batch) -> Tensor:
        found = self.of(batch, "reference log-probability")
        return torch.tensor([value for (value,) in found], device=batch["input_ids"].device)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout inside, as before outside."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def starts_at_zero(model: nn.Module) -> bool:
    """Whether a LoRA adapter adds nothing yet, so that the initial model is the one without it."""
    if not hasattr(model, "disable_adapter"):
        return False
    outer = [p for name, p in model.named_parameters() if "lora_B" in name or "lora_embedding_B" in name]
    return bool(outer) and not any(bool(p.detach().any()) for p in outer)


class ReferenceModel:
    """Logits of the initial model: adapters off where they start from nothing, else a frozen copy."""

    def __init__(self, model: nn.Module) -> None:
        self._adapted: Any = model if starts_at_zero(model) else None
        self._copy: nn.Module | None = None
        #: What is trained beside the adapter (biases, norms) and does not go away with it: parameter, initial value.
        self.beside: list[tuple[nn.Parameter, Tensor]] = [
            (p, p.detach().clone())
            for name, p in (model.named_parameters() if self._adapted is not None else ())
            if p.requires_grad and "lora_" not in name and ".modules_to_save." not in name
        ]
        if self._adapted is None:
            self._copy = copy.deepcopy(model).eval().requires_grad_(False)

    @property
    def extra_bytes(self) -> int:
        """Memory of the frozen copy."""
        if self._copy is None:
            return sum(value.numel() * value.element_size() for _, value in self.beside)
        return sum(p.numel() * p.element_size() for p in self._copy.parameters())

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        if self._copy is not None:
            device = batch["input_ids"].device
            if next(self._copy.parameters()).device != device:
                self._copy.to(device)
            return logits_of(self._copy, batch)
        now = [p.data for p, _ in self.beside]
        with evaluating(self._adapted):
            try:
                for p, value in self.beside:
                    p.data = value.to(p.device)
                with self._adapted.disable_adapter():
                    return logits_of(self._adapted, batch)
            finally:
                for (p, _), data in zip(self.beside, now, strict=True):
                    p.data = data
