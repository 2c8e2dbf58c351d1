"""Hessian-vector products by double backward.

H x = ∇⟨∇L, x⟩. The first backward keeps its graph, so this takes about three times a pass and the memory of the
activations of both; fused attention kernels have no second derivative, so attention is computed by plain matrix
products meanwhile (they give the same numbers up to rounding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import UnsupportedLayoutError
from .replay import RandomState

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
                slope = torch.stack([(g * x).sum().to(used[0][0].device) for g, x in used]).sum()
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


#: Length of a step of the probe over that of the weights, and the error from which on a product is called wrong.
_PROBE_STEP, _PROBE_ERROR = 1e-3, 0.05


def probe(closure: Callable[[], Tensor], parameters: Sequence[nn.Parameter], vector: Sequence[Tensor]) -> None:
    """Raise if the product of one micro-batch is not what the gradient does along ``vector``.

    A kernel whose backward is written by hand and does not depend on its inputs through autograd gives a wrong product
    and no error. Central differences at two distances tell their own error, so that rounding is not blamed.
    """
    length = _norm(vector)
    if length == 0.0:
        return
    with _same_random_numbers(parameters) as replay:
        product = hessian_product([closure], parameters, vector)
        distance = _PROBE_STEP * max(_norm([p.data for p in parameters]), 1e-3) / length
        coarse, fine = (_difference(closure, parameters, vector, d, replay) for d in (distance, distance / 2))
        replay()
    own = _norm([a - b for a, b in zip(coarse, fine, strict=True)])
    error = _norm([a - b for a, b in zip(product, fine, strict=True)])
    size = max(_norm(fine), _norm(product))
    if error > _PROBE_ERROR * size + 4.0 * own:
        raise UnsupportedLayoutError(
            "jacobian: exact, no_a1 and no_a2 differentiate twice, and a kernel of this model gives no second "
            f"derivative: its Hessian-vector product is {error / size:.0%} off finite differences. Use the model "
            "without fused kernels (Liger, flash attention, custom autograd functions), or jacobian: relaxed."
        )


def _difference(
    closure: Callable[[], Tensor],
    parameters: Sequence[nn.Parameter],
    vector: Sequence[Tensor],
    distance: float,
    replay: Callable[[], None],
) -> list[Tensor]:
    """(∇L(w + d·x) − ∇L(w − d·x)) / 2d; the weights are w again afterwards, bit for bit."""
    before = [p.data.clone() for p in parameters]
    sides: list[list[Tensor]] = []
    try:
        for sign in (1.0, -1.0):
            for p, old, x in zip(parameters, before, vector, strict=True):
                p.data.copy_(old).add_(x, alpha=sign * distance)
            replay()
            with sdpa_kernel(SDPBackend.MATH):
                found = torch.autograd.grad(closure(), parameters, allow_unused=True)
            sides.append([torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)])
    finally:
        for p, old in zip(parameters, before, strict=True):
            p.data.copy_(old)
    return [(a - b) / (2.0 * distance) for a, b in zip(*sides, strict=True)]


@contextmanager
def _same_random_numbers(parameters: Sequence[nn.Parameter]) -> Iterator[Callable[[], None]]:
    """Gives a function that goes back to the random state of the beginning (dropout), where the body ends, too."""
    state = RandomState.now(p.device for p in parameters)
    try:
        yield state.restore
    finally:
        state.restore()


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([t.detach().double().square().sum().cpu() for t in tensors]).sum().sqrt())
