"""Several processes that evaluate one model together: decisions of the first one, errors for all, jobs they share.

A job is many batches, each done by whichever process is free. The last bits of a number may depend on which samples
share a batch. So batches are planned once for all samples, whatever the number of processes, and each is computed by
exactly one process: the result is the same to the last bit. No process waits before all batches of all jobs are taken,
so neither small jobs nor answers of unforeseen length leave one idle.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..compat import accelerator_kind
from ..errors import ConfigError, RosuError

TIMEOUT = 1800.0  # seconds without a result from any process
#: Of the process group: whoever waits for the others must not be ended before the first process says what happened.
#: NCCL's own is ten minutes, less than a slow batch of answers may take.
GROUP = {"timeout": timedelta(seconds=2 * TIMEOUT)}
PAUSE = 0.02
PIECE = 1 << 22  # characters; torch.distributed's key-value store takes no value above 8 MB

T = TypeVar("T")


def world() -> tuple[int, int]:
    """This process's rank and how many processes there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def started_processes() -> int:
    """How many processes the launcher says it started; known before they have joined."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def joined_device() -> torch.device:
    """Join the other processes, if a launcher started some; this one's device.

    Without devices accelerate must be told, else every process believes it is alone.
    """
    from accelerate import PartialState

    alone = started_processes() == 1
    state = PartialState(cpu=not alone and accelerator_kind() is None, **({} if alone else GROUP))
    return torch.device(state.device)


def check_processes(asked: int | None, verb: str) -> None:
    """Raise when ``--num-processes`` asked for another number of processes than the launcher started."""
    started = started_processes()
    if asked is not None and asked != started:
        raise ConfigError(
            f"--num-processes {asked} was asked for, but {started} started. Launch with "
            f"'torchrun --nproc_per_node {asked} -m rosu_llm {verb} …' instead."
        )


def from_first(action: Callable[[], T]) -> T:
    """Run ``action`` on the first process; every process returns its result or raises its error."""
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


def first_error(mine: RosuError | None) -> RosuError | None:
    """The first error that any process met, the same one on all, so that none waits for a process that gave up."""
    _, size = world()
    errors = [mine] * size
    if size > 1:
        dist.all_gather_object(errors, mine)
    return next((error for error in errors if error is not None), None)


@dataclass(frozen=True)
class BatchJob:
    """Samples to be worked on, batch by batch."""

    title: str  # for the progress bar
    batches: Sequence[Sequence[int]]  # the samples' numbers, each once
    work: Callable[[Sequence[int]], Sequence[Any]]  # results of one batch, sample by sample, as JSON can hold them


#: Called with a job's place, its results by sample number, and the seconds of work they took over all processes.
Finished = Callable[[int, list[Any], float], None]


def run_jobs(jobs: Sequence[BatchJob], finished: Finished) -> None:
    """Do all batches of all jobs, in this order as far as processes are free.

    ``finished`` is called on the first process only, as soon as it learns that a job's last batch is done. An error of
    the package on one process is raised on all.
    """
    from tqdm import tqdm

    rank, size = world()
    queue = SharedWorkQueue() if size > 1 else WorkQueue()
    tasks = [(number, batch) for number, job in enumerate(jobs) for batch in job.batches]
    waiting = {number: len(job.batches) for number, job in enumerate(jobs)}
    found: dict[int, dict[int, Any]] = {number: {} for number in waiting}
    seconds = dict.fromkeys(waiting, 0.0)
    failed: RosuError | None = None

    def collect() -> int:
        """Take what was submitted and report every job that is now complete; returns how many batches arrived."""
        arrived = queue.drain()
        for task, values, took in arrived:
            number, batch = tasks[task]
            found[number].update(zip(batch, values, strict=True))
            seconds[number] += took
            waiting[number] -= 1
            if not waiting[number]:
                del waiting[number]
                results = found.pop(number)
                finished(number, [results[at] for at in range(len(results))], seconds[number])
        return len(arrived)

    with tqdm(total=len(tasks), unit="batch", disable=rank > 0, leave=False) as bar:
        try:
            while not queue.stopped and (at := queue.next()) < len(tasks):
                number, batch = tasks[at]
                bar.set_description(jobs[number].title)
                start = time.perf_counter()
                values = list(jobs[number].work(batch))
                queue.submit((at, values, time.perf_counter() - start))
                if rank == 0:
                    bar.update(collect())
            last = time.monotonic()
            while rank == 0 and waiting and not queue.stopped:
                if arrived := collect():
                    bar.update(arrived)
                    last = time.monotonic()
                elif time.monotonic() - last > TIMEOUT:
                    raise TimeoutError(f"No process finished a batch of the evaluation for {TIMEOUT:.0f} s.")
                else:
                    time.sleep(PAUSE)
        except RosuError as reason:
            failed = reason
            queue.stop()
    error = first_error(failed)
    if error is not None:
        if rank == 0:
            with suppress(RosuError):
                collect()  # keep what was finished before the error
        raise error


class WorkQueue:
    """Task numbers 0, 1, 2, … and the results submitted for them; this one is for a single process."""

    stopped = False

    def __init__(self) -> None:
        self._numbers, self._results = count(), list[Any]()

    def next(self) -> int:
        """The number of a task that no process has taken yet."""
        return next(self._numbers)

    def submit(self, result: Any) -> None:
        """Hand a result, which JSON can hold, to the first process."""
        self._results.append(result)

    def drain(self) -> list[Any]:
        """The results submitted since the last call; for the first process only."""
        found, self._results = self._results, []
        return found

    def stop(self) -> None:
        """Tell every process to take no further task."""


class SharedWorkQueue(WorkQueue):
    """The same for several processes, none of which waits for another.

    It lives in the key-value store through which torch.distributed's processes found each other. Results travel as
    JSON, which keeps every bit of a number.
    """

    _opened = count()  # every process opens the same queues in the same order

    def __init__(self) -> None:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        self._store = PrefixStore(f"rosu_llm/queue{next(self._opened)}", _get_default_store())
        self._rank, size = world()
        self._submitted, self._drained = 0, [0] * size

    @property
    def stopped(self) -> bool:  # type: ignore[override]
        return bool(self._store.check(["stopped"]))

    def next(self) -> int:
        return int(self._store.add("taken", 1)) - 1

    def submit(self, result: Any) -> None:
        text, key = json.dumps(result), f"{self._rank}/{self._submitted}"
        pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{key}/{number}", piece)
        self._store.set(key, str(len(pieces)))  # last, so that whoever sees this key finds every piece
        self._submitted += 1

    def drain(self) -> list[Any]:
        found = []
        for rank in range(len(self._drained)):
            while self._store.check([key := f"{rank}/{self._drained[rank]}"]):
                pieces = [f"{key}/{number}" for number in range(int(self._store.get(key)))]
                found.append(json.loads(b"".join(map(self._store.get, pieces))))
                for done in (key, *pieces):
                    self._store.delete_key(done)
                self._drained[rank] += 1
        return found

    def stop(self) -> None:
        self._store.set("stopped", "1")
