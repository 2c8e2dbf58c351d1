"""All pairs from one matrix: where per-sample gradients fit in memory, mini-batches cost no pass at all.

Row i of a matrix is the gradient of the *summed* loss of sample i. A mini-batch gradient is the sum of its rows over
the number of its units, so every inner product of a pair is a sum of entries of K = rows · rowsᵀ over two numbers:

    ⟨f, r⟩ = Σ_{i∈B_f, j∈B_r} K_ij / (T_f T_r).

K is float64. Its cost is n²·p multiplications once; 500 pairs per batch size then take seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...geometry import Gram, Vector
from ...space import LocalSpace
from .gradients import Part, Progress
from .pairs import Indices, check_full

#: Bytes of float64 converted at once.
_BLOCK = 1 << 27
_ROW_BLOCKS = 8

Matrix = NDArray[np.float64]


def needed_bytes(samples: int, space: LocalSpace) -> int:
    """Memory of the rows, of K, and of the block that is converted."""
    size = sum(p.numel() * p.element_size() for p in space.parameters)
    return samples * size + 8 * samples * samples + _BLOCK


def sample_gradients(space: LocalSpace, parts: Mapping[str, Part], progress: Progress) -> Tensor:
    """One row per sample, forget samples first."""
    dtype = max((p.dtype for p in space.parameters), key=lambda d: d.itemsize)
    total = sum(len(part) for part in parts.values())
    rows = torch.empty(total, sum(p.numel() for p in space.parameters), dtype=dtype)
    done = 0
    for name in ("forget", "retain"):
        for i in range(len(parts[name])):
            space.begin()
            space.backward(parts[name].loss([i]))
            at = 0
            for p in space.parameters:
                piece = rows[done, at : at + p.numel()]
                at += p.numel()
                piece.zero_() if p.grad is None else piece.copy_(p.grad.reshape(-1))
            done += 1
            progress("per-sample gradients", done, total)
    space.begin()
    return rows


def gram_matrix(rows: Tensor, progress: Progress) -> Matrix:
    """K in float64, from blocks of columns; only its lower half is multiplied out."""
    count, width = rows.shape
    step = max(1, _BLOCK // (8 * count))
    size = -(-count // _ROW_BLOCKS)
    result = torch.zeros(count, count, dtype=torch.float64)
    for start in range(0, width, step):
        block = rows[:, start : start + step].double()
        for low in range(0, count, size):
            high = min(low + size, count)
            result[low:high, :high].addmm_(block[low:high], block[:high].T)
        progress("inner products", min(start + step, width), width)
    lower: Matrix = result.tril_().numpy()
    return lower + np.tril(lower, -1).T


def save_matrix(path: Path, matrix: Matrix, tag: str) -> None:
    """Keep K, so that an audit that is interrupted from here on needs no pass when it goes on."""
    partial = path.with_name(f".{path.name}")
    save_file({"gram": torch.from_numpy(matrix)}, partial, metadata={"conditions": tag})
    partial.replace(path)


def load_matrix(path: Path, tag: str) -> Matrix | None:
    """K as it was kept under the same conditions, or nothing."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("conditions") != tag:
                return None
            matrix: Matrix = file.get_tensor("gram").numpy()
            return matrix
    except (SafetensorError, OSError):
        return None


class PerSample:
    """A :class:`~.gradients.PairSource` over K and the units of every sample, forget first."""

    def __init__(self, matrix: Matrix, forget: Matrix, retain: Matrix) -> None:
        self._matrix, self._offset = matrix, len(forget)
        self._units = np.concatenate([forget, retain])
        self._full = np.arange(self._offset, len(self._units))
        self._total = float(retain.sum())
        # ⟨g, ·⟩ with every sample
        self._along = matrix[:, self._full].sum(1) / self._total
        self._square = float(self._along[self._full].sum() / self._total)
        self.full_norm = sqrt(self._square) if self._square >= 0.0 else 0.0
        check_full(self.full_norm if np.isfinite(self._square) else self._square)

    def gram(self, forget: Indices, retain: Indices) -> Gram:
        members = {"g": self._full, "f": forget, "r": retain + self._offset}
        totals = {name: float(self._units[rows].sum()) for name, rows in members.items()}

        def product(a: str, b: str) -> float:
            block = self._matrix[np.ix_(members[a], members[b])]
            return float(block.sum()) / (totals[a] * totals[b])

        products = {("g", "g"): self._square}
        for name in ("f", "r"):
            products["g", name] = float(self._along[members[name]].sum()) / totals[name]
        products |= {(a, b): product(a, b) for a, b in (("f", "f"), ("f", "r"), ("r", "r"))}

        def weights(vector: Vector) -> Matrix:
            total = np.zeros(len(self._units))
            for name in vector:
                total[members[name]] += vector[name] / totals[name]
            return total

        # Weights are subtracted before any product is taken, so nothing is left to cancel.
        return Gram(products, measure=lambda x, y: float(weights(x) @ self._matrix @ weights(y)))
