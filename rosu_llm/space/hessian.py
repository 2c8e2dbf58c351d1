"""Hessian-vector products by double backward.

H x = ∇⟨∇L, x⟩. The first backward keeps its graph, so this takes about three times a pass and the memory of the
activations of both; fused attention kernels have no second derivative, so attention is computed by plain matrix
products meanwhile (they give the same numbers up to rounding).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import UnsupportedLayoutError

#: How torch says that something can be differentiated once only.
_ONCE_ONLY = ("not implemented", "differentiate twice", "torch.utils.checkpoint", "Checkpointing")


def hessian_product(
    closures: Sequence[Callable[[], Tensor]], parameters: Sequence[nn.Parameter], vector: Sequence[Tensor]
) -> list[Tensor]:
    """The Hessian of the sum of the closures' losses times ``vector``, one micro-batch after the other."""
    total = [torch.zeros_like(p, requires_grad=False) for p in parameters]
    for closure in closures:
        try:
            with sdpa_kernel(SDPBackend.MATH):
                first = torch.autograd.grad(closure(), parameters, create_graph=True, allow_unused=True)
                used = [(g, x) for g, x in zip(first, vector, strict=True) if g is not None and g.requires_grad]
                if not used:
                    continue
                slope = torch.stack([(g * x).sum() for g, x in used]).sum()
                second = torch.autograd.grad(slope, parameters, allow_unused=True)
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _ONCE_ONLY):
                raise
            raise UnsupportedLayoutError(
                "jacobian: exact, no_a1 and no_a2 differentiate twice, and a kernel of this model cannot "
                f"({' '.join(str(error).split())[:160]}). Load the model with attn_implementation='eager' and without "
                "reentrant gradient checkpointing, or use jacobian: relaxed."
            ) from error
        for whole, part in zip(total, second, strict=True):
            if part is not None:
                whole.add_(part.detach())
    return total
