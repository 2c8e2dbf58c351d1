"""Inner products of captured gradients, split over parts of the model (layers, kinds of matrices).

Each process sums over the pieces it owns; one all-reduce of parts × pairs float64 scalars makes them global.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .base import ParameterSpace
from .blocks import Sums, blocks, inner, work_dtype


def part_products(space: ParameterSpace, pairs: Sequence[tuple[str, str]], parts: Mapping[int, int]) -> Tensor:
    """``⟨gₐ, g_b⟩`` for every pair of names over the parameters of each part, float64, shape [parts, pairs].

    ``parts`` gives the number of a parameter's part, from 0, by the parameter's ``id``.
    """
    names = sorted({name for pair in pairs for name in pair})
    total = torch.zeros(1 + max(parts.values()), len(pairs), dtype=torch.float64)
    for owner, group in zip(space.owners(), space._by_parameter(names), strict=True):
        if owner is None:
            continue
        sums = Sums(len(pairs))
        for pieces in blocks(*group):
            work = work_dtype(pieces[0], precise=pieces[0].device.type == "cpu")
            wide = {name: piece.to(work) for name, piece in zip(names, pieces, strict=True)}
            sums.add(*(inner(wide[a], wide[b]) for a, b in pairs))
        total[parts[id(owner)]] += sums.total().cpu()
    return space._sum_over_shards(total.flatten()).view_as(total)
