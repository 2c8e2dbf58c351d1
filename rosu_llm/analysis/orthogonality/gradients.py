"""Two routes to the inner products of all pairs: keep the gradient of every sample, or recompute those of every pair.

Mini-batches are normalised like a training window: the sum over their units (answer tokens) divided by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, sqrt
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...errors import ConfigError, unknown
from ...geometry import Gram, Vector
from ...space import LocalSpace, ParameterSpace
from ...training.trainer import ROSUMixin
from ...training.window import PARTS
from .pairs import G, check_full
from .samples import AuditedSet, Indices

PER_SAMPLE = ("auto", "yes", "no")

#: Bytes of float64 converted at once.
_BLOCK = 1 << 27
_ROW_BLOCKS = 8

Matrix = NDArray[np.float64]
Progress = Callable[[str, int, int], None]


def needed_bytes(samples: int, space: LocalSpace) -> int:
    """Memory for the rows, K, and the block that is converted."""
    size = sum(p.numel() * p.element_size() for p in space.parameters)
    return samples * size + 8 * samples * samples + _BLOCK


def sample_gradients(space: LocalSpace, sets: Mapping[str, AuditedSet], progress: Progress) -> Tensor:
    """One row per sample, forget samples first."""
    dtype = max((p.dtype for p in space.parameters), key=lambda d: d.itemsize)
    samples = [(name, i) for name in PARTS for i in range(len(sets[name]))]
    sizes = [p.numel() for p in space.parameters]
    rows = torch.empty(len(samples), sum(sizes), dtype=dtype)
    for done, (name, i) in enumerate(samples):
        space.begin()
        space.backward(sets[name].loss([i]))
        for piece, p in zip(rows[done].split(sizes), space.parameters, strict=True):
            piece.zero_() if p.grad is None else piece.copy_(p.grad.reshape(-1))
        progress("per-sample gradients", done + 1, len(samples))
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


def save_matrix(path: Path, matrix: Matrix, conditions: str) -> None:
    """Write K, so that an interrupted audit resumes without any pass."""
    partial = path.with_name(f".{path.name}")
    save_file({"gram": torch.from_numpy(matrix)}, partial, metadata={"conditions": conditions})
    partial.replace(path)


def load_matrix(path: Path, conditions: str) -> Matrix | None:
    """K, if it was written under the same conditions."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("conditions") != conditions:
                return None
            matrix: Matrix = file.get_tensor("gram").numpy()
            return matrix
    except (SafetensorError, OSError):
        return None


class PerSample:
    """Inner products of any pair from K and the units of every sample, forget first; no further pass is needed.

    Row i of the gradients is that of the *summed* loss of sample i. A mini-batch gradient is the sum of its rows
    divided by the number T of its units, so an inner product of two of them is a sum of entries of K = rows · rowsᵀ
    over both T:

        ⟨f, r⟩ = Σ_{i∈B_f, j∈B_r} K_ij / (T_f T_r).

    K is float64. It takes n²·p multiplications once; 500 pairs per batch size then take seconds.
    """

    def __init__(self, matrix: Matrix, forget: Matrix, retain: Matrix) -> None:
        self._matrix, self._offset = matrix, len(forget)
        self._units = np.concatenate([forget, retain])
        self._full = np.arange(self._offset, len(self._units))
        self._total = float(retain.sum())
        # ⟨g, row⟩ for every sample
        self._along = matrix[:, self._full].sum(1) / self._total
        self._square = float(self._along[self._full].sum() / self._total)
        self.full_norm = sqrt(self._square) if self._square >= 0.0 else 0.0
        check_full(self.full_norm if np.isfinite(self._square) else self._square)

    def gram(self, forget: Indices, retain: Indices) -> Gram:
        """Inner products of ``g``, ``f`` and ``r``."""
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

        # Weights are subtracted before products are taken, so no large products cancel.
        return Gram(products, measure=lambda x, y: float(weights(x) @ self._matrix @ weights(y)))


class Recomputed:
    """Inner products of a pair from two passes: any model size, any layout.

    Three gradients are held at a time: that of the full retain set, of the pair's forget batch and of its retain batch.

    Args:
        space: owner of parameters and gradients.
        sets: ``forget`` and ``retain``.
        micro_batch: samples per forward pass.
        rank, world: this process among those that share every batch.
    """

    def __init__(
        self, space: ParameterSpace, sets: Mapping[str, AuditedSet], *, micro_batch: int, rank: int = 0, world: int = 1
    ) -> None:
        self._space, self._sets, self._micro = space, sets, micro_batch
        self._rank, self._world = rank, world
        self.full_norm = 0.0

    def stream_full(self, progress: Progress) -> None:
        """Compute and keep the gradient of the whole retain set."""
        self._space.begin()
        self._capture("g", "retain", np.arange(len(self._sets["retain"])), progress)
        self.full_norm = self._space.gram(["g"]).norm(G)
        check_full(self.full_norm)

    def gram(self, forget: Indices, retain: Indices) -> Gram:
        """Inner products of ``g``, ``f`` and ``r``."""
        self.capture_pair(forget, retain)
        return self._space.gram(["g", "f", "r"])

    def capture_pair(self, forget: Indices, retain: Indices) -> None:
        """Capture the gradients of both batches as ``f`` and ``r``."""
        self._capture("f", "forget", forget)
        self._capture("r", "retain", retain)

    def _capture(self, slot: str, name: str, indices: Indices, progress: Progress | None = None) -> None:
        data = self._sets[name]
        total = float(data.units[indices].sum())
        mine = indices[self._rank :: self._world].tolist()
        rounds = ceil(ceil(len(indices) / self._world) / self._micro)
        for i in range(rounds):
            chunk = mine[i * self._micro : (i + 1) * self._micro]
            # Gradients are averaged over processes; a process without samples joins the collectives with weight 0.
            weight = self._world / total if chunk else 0.0
            with self._space.micro_batch(last=i + 1 == rounds):
                self._space.backward(data.loss(chunk or indices[:1].tolist()) * weight)
            if progress is not None:
                progress("full retain gradient", i + 1, rounds)
        self._space.capture(slot)


#: What gives ‖g‖ of the full retain gradient, and the inner products of any pair.
PairSource = PerSample | Recomputed


def choose_route(
    trainer: ROSUMixin, space: ParameterSpace, samples: int, *, per_sample: str, begun: str | None = None
) -> str:
    """``per_sample`` or ``recompute``; an audit that has ``begun`` keeps its route unless told otherwise."""
    if per_sample not in PER_SAMPLE:
        raise unknown("--per-sample", per_sample, PER_SAMPLE)
    possible = trainer.layout == "local" and trainer.accelerator.mixed_precision != "fp16"
    if per_sample == "yes" and not possible:
        raise ConfigError(
            "--per-sample yes keeps the gradients of all samples in one process and without loss scaling: leave "
            "it out under several processes, sharding or fp16."
        )
    if per_sample == "auto" and begun is not None:
        return begun
    fits = (
        possible
        and isinstance(space, LocalSpace)
        and needed_bytes(samples, space) <= psutil.virtual_memory().available // 2
    )
    return "per_sample" if per_sample == "yes" or (per_sample == "auto" and fits) else "recompute"


def pair_source(
    trainer: ROSUMixin,
    space: ParameterSpace,
    sets: Mapping[str, AuditedSet],
    route: str,
    matrix_file: Path,
    conditions: str,
    progress: Progress,
) -> PairSource:
    """One pass over every sample (kept in ``matrix_file`` under these conditions), or one over the retain set."""
    trainer.model_wrapped.eval()
    trainer.compute_references(trainer.model_wrapped)
    if route == "per_sample":
        assert isinstance(space, LocalSpace)
        matrix = load_matrix(matrix_file, conditions)
        if matrix is None:
            matrix = gram_matrix(sample_gradients(space, sets, progress), progress)
            save_matrix(matrix_file, matrix, conditions)
        return PerSample(matrix, sets["forget"].units, sets["retain"].units)
    state, size = trainer.accelerator, trainer.args.train_batch_size
    recomputed = Recomputed(space, sets, micro_batch=size, rank=state.process_index, world=state.num_processes)
    recomputed.stream_full(progress)
    return recomputed
