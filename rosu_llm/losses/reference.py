"""What losses need of the initial model, at the least cost.

NPO needs one number per sample: log π_ref(answer | question). It is computed once, before the first
step, and travels with the checkpoints, so there is no second model and a resumed run sees the same
reference. Samples are recognised by content, so any data set and collator will do. KL needs the
initial model's distributions at every step: with an adapter that is the same model with the adapter
switched off; otherwise a frozen copy.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..errors import DataError
from .language import logits_of, sequence_logprobs
from .registry import Batch


def sample_keys(batch: Batch) -> list[str]:
    """One key per row, from its unpadded tokens and labels."""
    ids, labels = batch["input_ids"].cpu(), batch["labels"].cpu()
    mask = batch["attention_mask"].cpu().bool() if "attention_mask" in batch else torch.ones_like(ids).bool()
    keys = []
    for row, label, keep in zip(ids, labels, mask, strict=True):
        content = torch.stack([row[keep], label[keep]]).to(torch.int64).contiguous().numpy().tobytes()
        keys.append(hashlib.blake2b(content, digest_size=16).hexdigest())
    return keys


class ReferenceLogProbs:
    """log π_ref per sample, by content."""

    def __init__(self, values: dict[str, float] | None = None) -> None:
        self.values = dict(values or {})

    @torch.no_grad()
    def compute(self, model: nn.Module, batches: Iterable[Batch]) -> None:
        """Fill in every sample of ``batches`` under the weights the model has now, without dropout."""
        training = model.training
        model.eval()
        try:
            for batch in batches:
                logprobs = sequence_logprobs(logits_of(model, batch), batch["labels"])
                self.values.update(zip(sample_keys(batch), logprobs.double().tolist(), strict=True))
        finally:
            model.train(training)

    def know(self, batch: Batch) -> bool:
        """Whether every sample of the batch has a value."""
        return all(key in self.values for key in sample_keys(batch))

    def __call__(self, batch: Batch) -> Tensor:
        keys = sample_keys(batch)
        missing = sum(key not in self.values for key in keys)
        if missing:
            raise DataError(
                f"{missing} of {len(keys)} forget samples have no reference log-probability: the data set returned "
                "tokens it did not return when the references were computed. Use data without random "
                "augmentation, or a forget_loss without reference (nll, simnpo)."
            )
        return torch.tensor([self.values[k] for k in keys], device=batch["input_ids"].device)

    def save(self, path: Path) -> None:
        """Write a safetensors file: keys as bytes, values as float64."""
        keys = torch.tensor([list(bytes.fromhex(k)) for k in self.values], dtype=torch.uint8).reshape(-1, 16)
        save_file({"keys": keys, "values": torch.tensor(list(self.values.values()), dtype=torch.float64)}, str(path))

    @staticmethod
    def load(path: Path) -> ReferenceLogProbs:
        """Read what :meth:`save` wrote."""
        data = load_file(str(path))
        keys = [bytes(row.tolist()).hex() for row in data["keys"]]
        return ReferenceLogProbs(dict(zip(keys, data["values"].tolist(), strict=True)))


def _starts_at_zero(model: nn.Module) -> bool:
    """Whether a LoRA adapter adds nothing yet, so that the initial model is the one without it."""
    outer = [p for name, p in model.named_parameters() if "lora_B" in name or "lora_embedding_B" in name]
    return bool(outer) and not any(bool(p.detach().any()) for p in outer)


class ReferenceModel:
    """Logits of the initial model: adapters off where they start from nothing, else a frozen copy."""

    def __init__(self, model: nn.Module) -> None:
        self._adapted: Any = model if hasattr(model, "disable_adapter") and _starts_at_zero(model) else None
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
        training = self._adapted.training
        now = [p.data for p, _ in self.beside]
        self._adapted.eval()
        try:
            for p, value in self.beside:
                p.data = value.to(p.device)
            with self._adapted.disable_adapter():
                return logits_of(self._adapted, batch)
        finally:
            for (p, _), data in zip(self.beside, now, strict=True):
                p.data = data
            self._adapted.train(training)
