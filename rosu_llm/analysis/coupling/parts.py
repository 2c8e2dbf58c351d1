"""Coupling by part of the model: which layer, which kind of matrix.

⟨f, r⟩, ‖f‖² and ‖r‖² are sums over parameters, so any partition of the parameters has its own cos θ, and its
contribution ⟨f, r⟩_part/(‖f‖‖r‖) to the whole one; contributions add up to cos θ. Only running means and
variances over pairs are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

#: How the usual architectures call a matrix, and what it is; a name that is not here stands for itself.
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
#: Words of a name that say nothing about what a parameter is: wrappers, the adapter's name, the tensor itself.
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
class Layout:
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
    def of(model: nn.Module) -> Layout:
        """The parts of ``model``."""
        found = {id(p): (part_of(name), _size(p)) for name, p in model.named_parameters() if p.requires_grad}
        parts = sorted({part for part, _ in found.values()}, key=_place)
        sizes = [sum(size for part, size in found.values() if part == wanted) for wanted in parts]
        return Layout(tuple(parts), {key: parts.index(part) for key, (part, _) in found.items()}, tuple(sizes))


def _size(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))  # a ZeRO-3 parameter is empty between passes


class Running:
    """Mean and variance of a stream of vectors (Welford); entries that are NaN are left out one by one."""

    def __init__(self, size: int) -> None:
        self.count = np.zeros(size)
        self.mean = np.zeros(size)
        self._squares = np.zeros(size)

    def add(self, values: NDArray[np.float64]) -> None:
        """Take in one vector."""
        known = np.isfinite(values)
        change = np.where(known, values - self.mean, 0.0)
        self.count += known
        self.mean += change / np.maximum(self.count, 1)
        self._squares += change * np.where(known, values - self.mean, 0.0)

    def rows(self) -> list[tuple[float | None, float | None]]:
        """(mean, standard deviation) per entry; None where there is none."""
        result: list[tuple[float | None, float | None]] = []
        for n, mean, squares in zip(self.count, self.mean, self._squares, strict=True):
            spread = float(np.sqrt(squares / (n - 1))) if n > 1 else None
            result.append((float(mean) if n else None, spread))
        return result


class Grouping:
    """Statistics over pairs for one partition of the parts: all of them, by kind, or by layer."""

    def __init__(self, layout: Layout, keys: Iterable[tuple[int | None, str | None]]) -> None:
        members = list(keys)
        self._keys = sorted(set(members), key=_place)
        self._group = np.array([self._keys.index(key) for key in members])
        self._sizes = [
            sum(n for n, key in zip(layout.sizes, members, strict=True) if key == wanted) for wanted in self._keys
        ]
        size = len(self._keys)
        self._cosine, self._contribution = Running(size), Running(size)
        self._forget, self._retain = Running(size), Running(size)

    def add(self, products: NDArray[np.float64]) -> None:
        """One pair: rows are parts, columns ‖f‖², ⟨f, r⟩, ‖r‖²."""
        sums = np.zeros((len(self._keys), 3))
        np.add.at(sums, self._group, products)
        ff, fr, rr = sums.T
        with np.errstate(divide="ignore", invalid="ignore"):  # a part without gradient has no cosine
            self._cosine.add(np.clip(fr / np.sqrt(ff * rr), -1.0, 1.0))
            self._contribution.add(fr / np.sqrt(ff.sum() * rr.sum()))
            self._forget.add(ff / ff.sum())
            self._retain.add(rr / rr.sum())

    def rows(self) -> list[dict[str, Any]]:
        """One mapping per group, as it stands in the result file."""
        columns = (self._cosine, self._contribution, self._forget, self._retain)
        return [
            {
                "layer": layer,
                "kind": kind,
                "parameters": size,
                "cosine": cosine[0],
                "cosine_std": cosine[1],
                "contribution": contribution[0],
                "forget_share": forget[0],
                "retain_share": retain[0],
            }
            for (layer, kind), size, cosine, contribution, forget, retain in zip(
                self._keys, self._sizes, *(column.rows() for column in columns), strict=True
            )
        ]


class PartStatistics:
    """Coupling by part, by kind and by layer, over pairs."""

    def __init__(self, layout: Layout) -> None:
        self.groupings = {
            "by_part": Grouping(layout, layout.parts),
            "by_kind": Grouping(layout, [(None, kind) for _, kind in layout.parts]),
            "by_layer": Grouping(layout, [(layer, None) for layer, _ in layout.parts]),
        }

    def add(self, products: NDArray[np.float64]) -> None:
        """One pair's products by part."""
        for grouping in self.groupings.values():
            grouping.add(products)
