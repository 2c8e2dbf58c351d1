"""Vector algebra over lists of tensors, block by block, so that no second copy of a model appears.

Sums over 10⁸ float32 products lose two to three digits when accumulated in float32. Here a sum runs over a few
thousand products in float32 at most and on in float64, which keeps seven digits at full speed. The Gram matrix, from
which differences are formed, is float64 throughout on the CPU; elsewhere it is summed in this way, because a float64
copy of every product would be written and read again there. A caller asks for ``precise`` where a vector is a small
difference of large ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

#: Elements per block: half a megabyte of float64 on the CPU (fits in the cache), 64 MB elsewhere.
CPU_BLOCK = 1 << 16
DEVICE_BLOCK = 1 << 24
#: One block in so many of a tensor on the CPU is enough to know how its type rounds.
SAMPLED = 8
#: Float32 products that are summed in float32: the rounding of 4096 terms stays below that of the products.
ROW = 1 << 12


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching flat pieces of tensors of one shape, as views that can be written to.

    A tensor that is not contiguous cannot be viewed flat; then the tensors come whole. Pieces of tensors that are on
    another device than the first come as copies on its device.
    """
    first = tensors[0]
    if first.numel() == 0:
        return
    size = CPU_BLOCK if first.device.type == "cpu" else DEVICE_BLOCK
    found: Iterable[tuple[Tensor, ...]]
    if not all(t.is_contiguous() for t in tensors):
        found = [tensors]
    elif first.numel() <= size:
        found = [tuple(t.view(-1) for t in tensors)]
    else:
        found = zip(*(t.view(-1).split(size) for t in tensors), strict=True)
    if all(t.device == first.device for t in tensors):
        yield from found
        return
    for pieces in found:
        yield tuple(piece.to(first.device, non_blocking=True) for piece in pieces)


def sampled(tensor: Tensor) -> tuple[int, float]:
    """Every how many of its blocks a figure about rounding is measured, and what each of those then counts for.

    Rounding is alike all over a tensor, and on the CPU measuring it everywhere costs more than the perturbation.
    """
    count = -(-tensor.numel() // CPU_BLOCK)
    if tensor.device.type != "cpu" or count < 2 or not tensor.is_contiguous():
        return 1, 1.0
    return SAMPLED, count / -(-count // SAMPLED)


def work_dtype(tensor: Tensor, precise: bool) -> torch.dtype:
    """The type in which a block is combined: float32, or float64 where precision or the data ask for it."""
    if tensor.device.type == "mps":  # has no float64
        return torch.float32
    return torch.float64 if precise or tensor.dtype == torch.float64 else torch.float32


def combine(coefficients: Sequence[float], parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """``Σ cᵢ gᵢ`` of one block, in a new tensor of ``dtype``."""
    total = parts[0].to(dtype).mul(coefficients[0])
    for c, part in zip(coefficients[1:], parts[1:], strict=True):
        total.add_(part if part.dtype == dtype else part.to(dtype), alpha=c)
    return total


def inner(a: Tensor, b: Tensor) -> Tensor:
    """``⟨a, b⟩`` of one block as a 0-dimensional tensor, float64 where the device has it."""
    if a.dim() == 1 and (a.dtype == torch.float64 or a.device.type == "cpu"):
        return torch.dot(a, b)
    product = (a * b).reshape(-1)
    whole = product.numel() - product.numel() % ROW
    rows = product[:whole].view(-1, ROW).sum(1)
    if whole < product.numel():
        rows = torch.cat([rows, product[whole:].sum(0, keepdim=True)])
    return rows.sum() if a.device.type == "mps" else rows.sum(dtype=torch.float64)


class Sums:
    """A handful of float64 sums over blocks; they stay on their device until they are read."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._values: dict[torch.device, list[Tensor]] = {}

    def add(self, *values: Tensor) -> None:
        """Add one block's contribution to each sum."""
        self._values.setdefault(values[0].device, []).extend(values)

    def total(self) -> Tensor:
        """The sums over all devices: still there if it is one, else on the CPU. Whoever reads them waits."""
        found: list[Tensor] = []
        for device, values in self._values.items():
            stacked = torch.stack(values)
            wide = (stacked.cpu() if device.type == "mps" else stacked).to(torch.float64)
            found.append(wide.view(-1, self._count).sum(0))
        if len(found) == 1:
            return found[0]
        result = torch.zeros(self._count, dtype=torch.float64)
        for part in found:
            result += part.cpu()
        return result


def stochastic_round(value: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16 up or down at random so that the mean is right.

    Adding δ to a bfloat16 weight rounds almost all of it away (8 bits of mantissa). Rounding at
    random keeps δ in expectation: the realised perturbation then has the right projection on δ,
    at the price of noise, which the caller reports as distortion.
    """
    if dtype != torch.bfloat16:
        return value.to(dtype)
    bits = value.to(torch.float32).view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    rounded = ((bits + noise) & ~0xFFFF).view(torch.float32)
    return torch.where(torch.isfinite(value), rounded, value.to(torch.float32)).to(dtype)
