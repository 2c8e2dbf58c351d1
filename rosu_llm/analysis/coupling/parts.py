"""Coupling by part of the model: which layer, which kind of matrix.

⟨f, r⟩, ‖f‖² and ‖r‖² are sums over parameters, so any partition of the parameters has its own cos θ, and its
contribution ⟨f, r⟩_part/(‖f‖‖r‖) to that of the model; contributions add up to cos θ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

#: Kind of a matrix → its names in common architectures; any other name is a kind of its own.
KINDS = {
    "q": ("q_proj", "query", "wq"),
    "k": ("k_proj", "key", "wk"),
    "v": ("v_proj", "value", "wv"),
    "qkv": ("qkv_proj", "c_attn", "query_key_value", "Wqkv"),
    "o": ("o_proj", "out_proj", "wo", "dense"),
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "fc1", "c_fc", "w3", "dense_h_to_4h"),
    "gate_up": ("gate_up_proj",),
    "down": ("down_proj", "fc2", "w2", "dense_4h_to_h"),
    "embedding": ("embed_tokens", "wte", "wpe", "embed_in", "embed_positions"),
    "lm_head": ("lm_head", "embed_out"),
}
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
#: Words of a parameter's name that do not tell its kind: wrappers, the adapter's name, the tensor itself.
_SILENT = {"weight", "bias", "module", "default", "base_layer", "_orig_mod", "modules_to_save"}
_NORM = re.compile(r"norm|(^|_)ln(_|\d|$)", re.IGNORECASE)
_ADAPTER = re.compile(r"lora_(embedding_)?([AB])")

#: Order in which kinds are shown; others follow by name.
ORDER = ("embedding", "q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down", "norm", "lm_head")

Part = tuple[int | None, str]


def part_of(name: str) -> Part:
    """Layer (None outside the layers) and kind of the parameter called ``name``."""
    words = name.split(".")
    layer = next((int(word) for word in words if word.isdigit()), None)
    adapter = _ADAPTER.search(name)
    telling = [w for w in words if w not in _SILENT and not w.isdigit() and not _ADAPTER.fullmatch(w)] or words
    last = telling[-1]
    if last == "c_proj":  # GPT-2 gives the outputs of both blocks one name
        last = "o_proj" if "attn" in words else "down_proj"
    kind = "norm" if _NORM.search(last) else _KIND_OF.get(last, last)
    return layer, f"{kind} LoRA-{adapter[2]}" if adapter else kind


def _place(part: tuple[int | None, str | None]) -> tuple[Any, ...]:
    layer, kind = part
    stem = (kind or "").partition(" ")[0]
    return (layer is None, layer or 0, ORDER.index(stem) if stem in ORDER else len(ORDER), kind or "")


@dataclass(frozen=True)
class ModelParts:
    """The parts of a model's trainable parameters.

    Attributes:
        parts: all parts, layers first.
        numbers: number of a parameter's part by the parameter's ``id``; tied parameters count once.
        sizes: parameters in each part, over all processes.
    """

    parts: tuple[Part, ...]
    numbers: dict[int, int]
    sizes: tuple[int, ...]

    @staticmethod
    def of(model: nn.Module) -> ModelParts:
        """The parts of ``model``."""
        found = {id(p): (part_of(name), p) for name, p in model.named_parameters() if p.requires_grad}
        parts = sorted({part for part, _ in found.values()}, key=_place)
        numbers = {key: parts.index(part) for key, (part, _) in found.items()}
        sizes = [0] * len(parts)
        for key, (_, p) in found.items():
            sizes[numbers[key]] += int(getattr(p, "ds_numel", p.numel()))  # a ZeRO-3 parameter is empty between passes
        return ModelParts(tuple(parts), numbers, tuple(sizes))

    def coupling(
        self, products: Sequence[NDArray[np.float64]], by: Literal["part", "kind", "layer"]
    ) -> list[dict[str, Any]]:
        """A row for every part, for every kind over all layers, or for every layer over all kinds.

        Args:
            products: ‖f‖², ⟨f, r⟩ and ‖r‖² of every part, pair by pair.
        """
        members = [(layer if by != "kind" else None, kind if by != "layer" else None) for layer, kind in self.parts]
        keys = sorted(set(members), key=_place)
        group = np.array([keys.index(key) for key in members])
        mean, std = _mean_and_std([_group_coupling(pair, group, len(keys)) for pair in products])
        sizes = np.bincount(group, weights=self.sizes)
        return [
            {
                "layer": layer,
                "kind": kind,
                "parameters": int(sizes[i]),
                "cosine": mean[0, i],
                "cosine_std": std[0, i],
                "contribution": mean[1, i],
                "forget_share": mean[2, i],
                "retain_share": mean[3, i],
            }
            for i, (layer, kind) in enumerate(keys)
        ]


def _group_coupling(products: NDArray[np.float64], group: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Cosine, contribution, share of ‖f‖² and share of ‖r‖² of every group; NaN where a gradient vanishes."""
    sums = np.zeros((count, 3))
    np.add.at(sums, group, products)
    ff, fr, rr = sums.T
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = np.clip(fr / np.sqrt(ff * rr), -1.0, 1.0)
        return np.stack([cosine, fr / np.sqrt(ff.sum() * rr.sum()), ff / ff.sum(), rr / rr.sum()])


def _mean_and_std(arrays: Sequence[NDArray[np.float64]]) -> tuple[NDArray[np.object_], NDArray[np.object_]]:
    """Over the finite values of each entry (Welford): None without values, and for the deviation with only one."""
    count, average, squares = (np.zeros_like(arrays[0]) for _ in range(3))
    for values in arrays:
        known = np.isfinite(values)
        change = np.where(known, values - average, 0.0)
        count += known
        average += change / np.maximum(count, 1)
        squares += change * np.where(known, values - average, 0.0)
    mean, std = average.astype(object), np.sqrt(squares / np.maximum(count - 1, 1)).astype(object)
    mean[count < 1], std[count < 2] = None, None
    return mean, std
