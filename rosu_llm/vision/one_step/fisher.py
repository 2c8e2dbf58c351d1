"""FF, Fisher forgetting: noise where the retain images do not mind (Golatkar et al., 2020).

    w ← w + √v ⊙ ε,  ε ~ N(0, I),  v = λ · min(1/(F + 1e-8), 1e3),  ten times as much in the head,

with F the diagonal of the Fisher information over retain images, F_i = mean of (∂ log p(y)/∂w_i)² with one y per image
drawn from the model's own p. Where F is large the kept images depend on a weight, and it gets little noise.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..models import head_of
from .samples import add_flat, sample_gradients, trained

#: What keeps 1/F finite, its largest value, and the factor of the head.
FLOOR, CEILING, HEAD = 1e-8, 1e3, 10.0


def fisher_diagonal(model: nn.Module, pixels: Tensor, *, seed: int) -> Tensor:
    """F over images that are normalised already, as one flat vector in float64."""
    with torch.no_grad():
        chances = torch.cat([model(pixel_values=part).logits.softmax(-1) for part in pixels.split(256)])
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(chances.double().cpu(), 1, generator=generator)[:, 0].to(pixels.device)
    total = sum(rows.double().square().sum(0) for rows in sample_gradients(model, pixels, labels))
    assert isinstance(total, Tensor)
    return total / len(pixels)


def noise_variance(model: nn.Module, fisher: Tensor, strength: float) -> Tensor:
    """v of every parameter."""
    variance = strength * (1.0 / (fisher + FLOOR)).clamp(max=CEILING)
    head = {id(p) for p in head_of(model).parameters()}
    sizes = [(p.numel(), HEAD if id(p) in head else 1.0) for p in trained(model).values()]
    return variance * torch.cat([torch.full((n,), factor, dtype=fisher.dtype) for n, factor in sizes]).to(fisher.device)


def fisher_forgetting(model: nn.Module, retain: Tensor, *, strength: float, seed: int) -> None:
    """Add the noise; ``retain`` are normalised images, ``strength`` is λ."""
    model.eval()
    variance = noise_variance(model, fisher_diagonal(model, retain, seed=seed), strength)
    generator = torch.Generator().manual_seed(seed + 1)
    noise = torch.randn(len(variance), generator=generator, dtype=torch.float64).to(variance.device)
    add_flat(model, variance.sqrt() * noise)
