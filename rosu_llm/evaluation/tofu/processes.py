"""Work shared among processes: whole batches are dealt out, small results come back to everyone.

A number may depend, in its last bits, on which samples share a batch. So the batches are planned once for all
samples, whatever the number of processes, and each is computed by exactly one of them: the result is the same to the
last bit. Without ``torch.distributed`` everything here is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from ...errors import RosuError

T = TypeVar("T")


def world() -> tuple[int, int]:
    """This process's number and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def plan(lengths: Sequence[int], *, batch_size: int, batch_tokens: int, order: Sequence[Any] = ()) -> list[list[int]]:
    """Batches of sample numbers, longest first, each of at most ``batch_size`` samples and ``batch_tokens`` tokens.

    Tokens are counted with padding; a sample that is longer than the budget gets a batch of its own. ``order``
    replaces the length as what samples are sorted by.
    """
    keys = order or lengths
    batches: list[list[int]] = []
    widest = 0
    for at in sorted(range(len(lengths)), key=lambda at: keys[at], reverse=True):
        grown = max(widest, lengths[at])
        if batches and len(batches[-1]) < batch_size and grown * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(at)
            widest = grown
        else:
            batches.append([at])
            widest = lengths[at]
    return batches


def share(batches: Sequence[Sequence[int]], work: Callable[[Sequence[int]], Sequence[T]], title: str) -> list[T]:
    """``work`` on every batch, each on one process; all results, by sample number, on all processes.

    An error of the package on one process is raised on all, so that none waits for one that gave up.
    """
    from tqdm import tqdm

    rank, size = world()
    found: dict[int, T] = {}
    failed: RosuError | None = None
    try:
        for batch in tqdm(batches[rank::size], desc=title, unit="batch", disable=rank > 0, leave=False):
            found.update(zip(batch, work(batch), strict=True))
    except RosuError as error:
        failed = error
    parts: list[Any] = [(found, failed)]
    if size > 1:
        parts = [None] * size
        dist.all_gather_object(parts, (found, failed))
    for _, reason in parts:
        if reason is not None:
            raise reason
    merged: dict[int, T] = {at: value for part, _ in parts for at, value in part.items()}
    return [merged[at] for at in range(len(merged))]


def from_first(action: Callable[[], T]) -> T:
    """What ``action`` returns or raises on the first process, on all of them."""
    rank, size = world()
    if size == 1:
        return action()
    outcome: list[Any] = [None, None]
    if rank == 0:
        try:
            outcome[0] = action()
        except RosuError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result
