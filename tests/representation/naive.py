"""The paper's Algorithm 3, and RMU, once more: plain loops over documents, tokens and two deep-copied models.

Shares no line with the package. One document at a time, without padding; activations by a forward hook; gradients by
``autograd.grad``; vectors are float64. Only σ and the control vectors are handed in, since they are random.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Documents = Sequence[Sequence[int]]

#: What is added to h before it is compared, for a document of the given number.
Shift = Callable[[int, Tensor], Tensor]


def nothing(_: int, hidden: Tensor) -> Tensor:
    return torch.zeros_like(hidden)


@dataclass
class Step:
    """What one step computed."""

    losses: dict[str, float]
    gradients: dict[str, Tensor]
    update: Tensor
    fallback: bool = False
    alpha: float = 0.0


@dataclass
class Naive:
    """A model whose named parameters are moved, and its frozen original.

    Args:
        model: copied twice, never touched.
        layer: name of the module whose output is looked at.
        names: the trainable parameters.
        reduction: of the losses.
    """

    model: nn.Module
    layer: str
    names: list[str]
    reduction: str = "token_mean"
    current: nn.Module = field(init=False)
    original: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.current, self.original = copy.deepcopy(self.model).eval(), copy.deepcopy(self.model).eval()

    @property
    def theta(self) -> list[nn.Parameter]:
        named = dict(self.current.named_parameters())
        return [named[name] for name in self.names]

    def vector(self) -> Tensor:
        return torch.cat([p.detach().double().reshape(-1) for p in self.theta])

    def assign(self, vector: Tensor) -> None:
        for p, piece in zip(self.theta, vector.split([p.numel() for p in self.theta]), strict=True):
            p.data = piece.reshape(p.shape).to(p.dtype)

    def hidden(self, model: nn.Module, document: Sequence[int]) -> Tensor:
        seen: list[Any] = []
        hook = model.get_submodule(self.layer).register_forward_hook(lambda _, __, output: seen.append(output))
        try:
            ids = torch.tensor([list(document)])
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
        finally:
            hook.remove()
        output = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
        return output[0].double()

    def distance(self, documents: Documents, shift: Shift = nothing, *, to_original: bool = True) -> Tensor:
        """½ mean over tokens, or ½ mean over documents, or mean over entries, of ‖h − h₀ + shift‖²."""
        total, tokens, entries = torch.zeros((), dtype=torch.float64), 0, 0
        for number, document in enumerate(documents):
            now = self.hidden(self.current, document)
            with torch.no_grad():
                before = self.hidden(self.original, document) if to_original else torch.zeros_like(now)
            residual = now - before + shift(number, now).double()
            for row in residual:
                total = total + (row * row).sum()
                tokens += 1
                entries += row.numel()
        return {
            "token_mean": total / (2 * tokens),
            "paper": total / (2 * len(documents)),
            "rmu": total / entries,
        }[self.reduction]

    def gradient(self, loss: Tensor) -> Tensor:
        pieces = torch.autograd.grad(loss, self.theta)
        return torch.cat([g.double().reshape(-1) for g in pieces])

    # -- steps, with plain SGD of rate η ---------------------------------------------------------------------

    def algorithm_3(
        self, forget: Documents, retain: Documents, noise: Shift, *, eta: float, rho: float, beta: float,
        tau: float = 1e-8, eps_q: float = 1e-6, components: str = "full", jacobian: str = "relaxed",
    ) -> Step:  # fmt: skip
        """Lines 2 to 14."""
        loss_f, loss_r = self.distance(forget, noise), self.distance(retain)
        losses = {"forget": loss_f.item(), "retain": loss_r.item()}
        f, r = self.gradient(loss_f), self.gradient(loss_r)
        theta = self.vector()
        q = f - (f @ r) / (r @ r + tau) * r
        if q.norm() <= eps_q:
            update = -eta * r if components != "delta_only" else torch.zeros_like(r)
            self.assign(theta + update)
            return Step(losses, {"f": f, "r": r}, update, fallback=True)
        u = q / q.norm()
        delta, alpha = rho * u, float(rho / q.norm())
        self.assign(theta + delta)
        loss_s = self.distance(retain)
        s = self.gradient(loss_s)
        v = s + alpha * (s - (r @ s) / (r @ r + tau) * r - (u @ s) * u) if jacobian == "relaxed" else s
        update = {"full": beta * delta - eta * v, "delta_only": beta * delta, "v_only": -eta * v}[components]
        self.assign(theta + update)
        return Step({**losses, "surrogate": loss_s.item()}, {"f": f, "r": r, "s": s}, update, alpha=alpha)

    def uam(self, forget: Documents, retain: Documents, noise: Shift, *, eta: float, rho: float) -> Step:
        """θ ← θ − η ∇L_r(θ + ρ f/‖f‖)."""
        loss_f, loss_r = self.distance(forget, noise), self.distance(retain)
        f, r = self.gradient(loss_f), self.gradient(loss_r)
        theta = self.vector()
        self.assign(theta + rho * f / f.norm())
        loss_s = self.distance(retain)
        s = self.gradient(loss_s)
        self.assign(theta - eta * s)
        losses = {"forget": loss_f.item(), "retain": loss_r.item(), "surrogate": loss_s.item()}
        return Step(losses, {"f": f, "r": r, "s": s}, -eta * s)

    def rmu(self, forget: Documents, retain: Documents, control: Shift, *, alpha: float, eta: float) -> Step:
        """θ ← θ − η ∇( mean (h_f − c·u)² + α mean (h_r − h₀_r)² )."""
        steer = self.distance(forget, lambda i, h: -control(i, h), to_original=False)
        keep = self.distance(retain)
        gradient = self.gradient(steer + alpha * keep)
        self.assign(self.vector() - eta * gradient)
        return Step({"forget": steer.item(), "retain": keep.item()}, {}, -eta * gradient)
