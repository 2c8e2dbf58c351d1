"""A problem with known answers: quadratic losses of a float64 module, every figure of a diagnosis in closed form.

L_f = mean over samples of gᵢ·w + ½wᵀAw, L_r = mean of hᵢ·w + ½wᵀBw, over w = all parameters; then f = ḡ + Aw,
r = h̄ + Bw, and the change along δ is ⟨r, δ⟩ + ½δᵀBδ exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rosu_llm.losses import LOSSES, register_loss

SIZE = 12


class Vectors(nn.Module):
    """Twelve numbers under the names of a small transformer's parameters."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.embed_tokens = nn.Module()
        self.layers = nn.ModuleList([nn.Module(), nn.Module()])
        self._add(self.embed_tokens, start[:4])
        for i, layer in enumerate(self.layers):
            layer.q_proj = nn.Module()
            layer.down_proj = nn.Module()
            self._add(layer.q_proj, start[4 + 4 * i : 6 + 4 * i])
            self._add(layer.down_proj, start[6 + 4 * i : 8 + 4 * i])

    @staticmethod
    def _add(module: nn.Module, values: Tensor) -> None:
        module.weight = nn.Parameter(values.clone())

    def flat(self) -> Tensor:
        return torch.cat([p.reshape(-1) for p in self.parameters()])


@dataclass
class Problem:
    """Samples gᵢ and hᵢ, Hessians A and B, the point w."""

    forget: np.ndarray
    retain: np.ndarray
    a: np.ndarray
    b: np.ndarray
    w: np.ndarray

    def model(self) -> Vectors:
        return Vectors(torch.from_numpy(self.w))

    def samples(self, part: str) -> list[dict[str, Any]]:
        return [{"slope": torch.from_numpy(row)} for row in (self.forget if part == "forget" else self.retain)]

    def gradients(self, forget: Sequence[int], retain: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        f = self.forget[list(forget)].mean(0) + self.a @ self.w
        return f, self.retain[list(retain)].mean(0) + self.b @ self.w


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    return {"input_ids": torch.stack([s["slope"] for s in samples])}


@contextmanager
def quadratic_losses(problem: Problem) -> Iterator[tuple[str, str]]:
    """The problem's two losses, registered meanwhile."""
    for name, matrix in (("quadratic_f", problem.a), ("quadratic_r", problem.b)):
        hessian = torch.from_numpy(matrix)

        def loss(model: Any, batch: Any, context: Any, hessian: Tensor = hessian) -> Tensor:
            w = model.module.flat() if hasattr(model, "module") else model.flat()
            return batch["input_ids"].sum(0) @ w + 0.5 * len(batch["input_ids"]) * (w @ hessian @ w)

        register_loss(name, unit="row")(loss)
    try:
        yield "quadratic_f", "quadratic_r"
    finally:
        del LOSSES["quadratic_f"], LOSSES["quadratic_r"]


def symmetric(generator: np.random.Generator, scale: float) -> np.ndarray:
    matrix = generator.normal(size=(SIZE, SIZE))
    return scale * (matrix + matrix.T) / 2
