"""The paper's Algorithm 1 once more, written from the paper in float64 over flat vectors.

Shares no line with the package: losses are written out, gradients come from autograd through
``functional_call``, the update is the paper's line by line. Tests compare the package with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

Samples = Sequence[dict[str, list[int]]]


def mean_nll(model: nn.Module, weights: dict[str, Tensor], samples: Samples) -> Tensor:
    """Mean over all answer tokens of −log p, one sample at a time: no padding, no masks."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        ids = torch.tensor([sample["input_ids"]])
        logits = functional_call(model, weights, (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}).logits
        logprobs = torch.log_softmax(logits[0].double(), -1)
        for position, label in enumerate(sample["labels"]):
            if position > 0 and label != -100:
                total = total - logprobs[position - 1, label]
                count += 1
    return total / count


class Flat:
    """A model's trainable weights as one vector."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.shapes = [p.shape for p in model.parameters() if p.requires_grad]

    def vector(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters() if p.requires_grad]).double().clone()

    def weights(self, w: Tensor) -> dict[str, Tensor]:
        dtype = next(self.model.parameters()).dtype
        pieces = w.split([s.numel() for s in self.shapes])
        return {n: x.reshape(s).to(dtype) for n, x, s in zip(self.names, pieces, self.shapes, strict=True)}

    def gradient(self, loss: Callable[[dict[str, Tensor]], Tensor], w: Tensor) -> Tensor:
        w = w.detach().clone().requires_grad_()
        return torch.autograd.grad(loss(self.weights(w)), w)[0].double()


def algorithm_1(
    model: nn.Module,
    forget: Samples,
    retain: Samples,
    *,
    eta: float,
    rho: float,
    beta: float,
    tau: float = 1e-8,
    eps_q: float = 1e-6,
    zero_order: bool = False,
) -> tuple[Tensor, Tensor]:
    """(w, updated w) after one step of Algorithm 1 (or 2)."""
    space = Flat(model)
    w = space.vector()
    loss_f = lambda weights: mean_nll(model, weights, forget)
    loss_r = lambda weights: mean_nll(model, weights, retain)
    delta, v = surrogate_step(space, w, loss_f, loss_r, rho=rho, tau=tau, eps_q=eps_q, zero_order=zero_order)
    return w, w + beta * delta - eta * v


def surrogate_step(
    space: Flat,
    w: Tensor,
    loss_f: Callable[[dict[str, Tensor]], Tensor],
    loss_r: Callable[[dict[str, Tensor]], Tensor],
    *,
    rho: float,
    tau: float = 1e-8,
    eps_q: float = 1e-6,
    zero_order: bool = False,
) -> tuple[Tensor, Tensor]:
    """δ and v of Algorithm 1 (or 2) at w; in the fallback no δ, and v = g_r."""
    g_f, g_r = space.gradient(loss_f, w), space.gradient(loss_r, w)
    q = g_f - (g_f @ g_r) / (g_r @ g_r + tau) * g_r
    if q.norm() <= eps_q:
        return torch.zeros_like(w), g_r
    u = q / q.norm()
    delta = rho * u
    alpha = rho / q.norm()
    s = space.gradient(loss_r, w + delta)
    v = s if zero_order else s + alpha * (s - (g_r @ s) / (g_r @ g_r + tau) * g_r - (u @ s) * u)
    return delta, v
