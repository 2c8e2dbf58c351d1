"""Gradients of single images, by the model's running statistics; flat vectors over the trainable parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

#: Numbers that a chunk of per-image gradients may hold: 256 MB in float32.
_ROOM = 1 << 26


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def sample_gradients(model: nn.Module, pixels: Tensor, labels: Tensor) -> Iterator[Tensor]:
    """∇ −log p(label) of every image, in chunks of rows [images, parameters]; the model is in evaluation mode."""
    weights = {name: p.detach() for name, p in trained(model).items()}
    others = {name: p.detach() for name, p in model.named_parameters() if name not in weights} | dict(
        model.named_buffers()
    )

    def loss(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = functional_call(model, {**own, **others}, (x[None],)).logits
        return functional.cross_entropy(logits, y[None])

    size = sum(p.numel() for p in weights.values())
    each = max(1, min(64, _ROOM // size))
    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    for x, y in zip(pixels.split(each), labels.split(each), strict=True):
        found = gradients(weights, x, y)
        yield torch.cat([found[name].flatten(1) for name in weights], dim=1)


@torch.no_grad()
def add_flat(model: nn.Module, change: Tensor, scale: float = 1.0) -> None:
    """Weights += scale · change."""
    parts = change.split([p.numel() for p in trained(model).values()])
    for p, part in zip(trained(model).values(), parts, strict=True):
        p.add_(part.view_as(p).to(p.dtype), alpha=scale)
