"""Work shared among processes: whole batches, each done by whichever process is free.

A number may depend, in its last bits, on which samples share a batch. So the batches are planned once for all
samples, whatever the number of processes, and each is computed by exactly one of them: the result is the same to the
last bit. Nobody waits until all batches of all jobs are done, so neither small jobs nor answers of unforeseen length
leave a process idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ...errors import RosuError
from .processes import Desk, SharedDesk, first_error, world

PATIENCE = 1800.0  # seconds without a result from any process
PAUSE = 0.02


@dataclass(frozen=True)
class Job:
    """Samples to be worked on.

    Attributes:
        title: for the progress bar.
        batches: the samples' numbers, each once.
        work: gives the results of one batch, sample by sample, as JSON can hold them.
    """

    title: str
    batches: Sequence[Sequence[int]]
    work: Callable[[Sequence[int]], Sequence[Any]]


#: Called with a job's place, its results by sample number, and the seconds of work they took over all processes.
Finished = Callable[[int, list[Any], float], None]


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


def share(jobs: Sequence[Job], finished: Finished) -> None:
    """Do all batches of all jobs, in this order as far as processes are free.

    ``finished`` is called on the first process only, as soon as it learns that a job's last batch is done. An error of
    the package on one process is raised on all.
    """
    from tqdm import tqdm

    rank, size = world()
    tasks = [(number, batch) for number, job in enumerate(jobs) for batch in job.batches]
    desk = SharedDesk() if size > 1 else Desk()
    files = _Files(jobs, finished)
    failed: RosuError | None = None
    with tqdm(total=len(tasks), unit="batch", disable=rank > 0, leave=False) as bar:
        try:
            while not desk.stopped and (at := desk.claim()) < len(tasks):
                number, batch = tasks[at]
                bar.set_description(jobs[number].title)
                start = time.perf_counter()
                values = list(jobs[number].work(batch))
                desk.hand_in((at, values, time.perf_counter() - start))
                if rank == 0:
                    bar.update(_take(desk, tasks, files))
            last = time.monotonic()
            while rank == 0 and files.waiting and not desk.stopped:
                if taken := _take(desk, tasks, files):
                    bar.update(taken)
                    last = time.monotonic()
                elif time.monotonic() - last > PATIENCE:
                    raise TimeoutError(f"No process finished a batch of the evaluation for {PATIENCE:.0f} s.")
                else:
                    time.sleep(PAUSE)
        except RosuError as reason:
            failed = reason
            desk.stop()
    error = first_error(failed)
    if error is not None:
        if rank == 0:
            with suppress(RosuError):
                _take(desk, tasks, files)  # what had been finished by then is kept
        raise error


def _take(desk: Desk, tasks: Sequence[tuple[int, Sequence[int]]], files: _Files) -> int:
    """File what was handed in; returns how many batches that is."""
    arrived = desk.collect()
    for at, values, seconds in arrived:
        number, batch = tasks[at]
        files.add(number, batch, values, seconds)
    return len(arrived)


@dataclass
class _Files:
    """The results of every job, as far as they are there."""

    jobs: Sequence[Job]
    finished: Finished
    waiting: dict[int, int] = field(init=False)
    found: dict[int, dict[int, Any]] = field(init=False)
    seconds: dict[int, float] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = {number: len(job.batches) for number, job in enumerate(self.jobs)}
        self.found = {number: {} for number in self.waiting}
        self.seconds = dict.fromkeys(self.waiting, 0.0)

    def add(self, number: int, batch: Sequence[int], values: Sequence[Any], seconds: float) -> None:
        self.found[number].update(zip(batch, values, strict=True))
        self.seconds[number] += seconds
        self.waiting[number] -= 1
        if not self.waiting[number]:
            del self.waiting[number]
            found = self.found.pop(number)
            self.finished(number, [found[at] for at in range(len(found))], self.seconds[number])
