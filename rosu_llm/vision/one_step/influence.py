"""IU, influence unlearning: one Newton-like step away from the forget images (Koh and Liang, 2017; Izzo et al., 2021).

Without n_f of n images the mean gradient at w is −(n_f/n)(ḡ_f − ḡ_r) away from zero, so that

    w ← w + α H⁻¹ v,   v = (n_f/n)(ḡ_f − ḡ_r),

with H the empirical Fisher matrix of retain images, inverted by the recursion of WoodFisher with two vectors (Singh and
Alistarh, 2020, as unlearning benchmarks use it; N = number of images, g their gradients one by one):

    o ← first g,  k ← v;   then  t = ⟨o, g⟩,  k ← k − ⟨k, g⟩/(N + t) · o,  o ← o − t/(N + t) · o.

The exact recursion would keep one vector per image; this one lets o stand for all of them, an approximation.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from .samples import add_flat, sample_gradients, trained


def mean_gradient(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """∇ of the mean −log p(label) over all images, as one flat vector in float64."""
    weights = list(trained(model).values())
    total = torch.zeros(sum(p.numel() for p in weights), dtype=torch.float64, device=weights[0].device)
    count = 0
    for pixels, labels in batches:
        loss = functional.cross_entropy(model(pixel_values=pixels).logits, labels, reduction="sum")
        found = torch.autograd.grad(loss, weights)
        total += torch.cat([part.flatten() for part in found]).double()
        count += len(labels)
    return total / count


def inverse_product(gradients: Iterable[Tensor], vector: Tensor, count: int) -> Tensor:
    """H⁻¹ v by the recursion, over rows of per-image gradients."""
    k, o = vector.clone(), None
    for rows in gradients:
        for g in rows.to(vector.dtype):
            if o is None:
                o = g.clone()
                continue
            t = torch.dot(o, g)
            k -= torch.dot(k, g) / (count + t) * o
            o -= t / (count + t) * o
    return k


def influence_unlearning(
    model: nn.Module,
    forget: Iterable[tuple[Tensor, Tensor]],
    retain: Iterable[tuple[Tensor, Tensor]],
    curvature: tuple[Tensor, Tensor],
    *,
    share: float,
    strength: float,
) -> None:
    """Take the step.

    Args:
        forget, retain: batches of normalised images and labels.
        curvature: retain images and labels that H is taken from.
        share: n_f/n.
        strength: α.
    """
    model.eval()
    vector = share * (mean_gradient(model, forget) - mean_gradient(model, retain))
    pixels, labels = curvature
    add_flat(model, inverse_product(sample_gradients(model, pixels, labels), vector, len(labels)), strength)
