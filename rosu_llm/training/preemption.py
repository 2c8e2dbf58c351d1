"""Leave when a scheduler asks for it: save at the end of the running step, and say that the run is not finished.

SIGTERM comes from Slurm, Kubernetes and spot instances, SIGUSR1 from ``sbatch --signal``. It may reach one process of
several only, so they agree at every step. The checkpoint is an ordinary one, made where all checkpoints are made: a run
that resumes from it is bit for bit the run that was never stopped. Trainer's own ``enable_jit_checkpoint`` saves in the
middle of a step, and ends like a finished run.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..errors import RosuError

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class PreemptedError(RosuError, RuntimeError):
    """The run was asked to stop, and left a checkpoint to go on from."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _StopAtStep(TrainerCallback):
    """Saves after the step in which a signal came, and then leaves."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.received = 0  # the signal's number
        self._stops = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps or not self._agreed():
            return
        self._stops = control.should_save = True
        args.save_only_model = False  # from a model alone nobody can go on
        control.should_evaluate = False  # there is no time, and no need: nothing that follows depends on it

    def _agreed(self) -> bool:
        accelerator = self._trainer.accelerator
        if accelerator.num_processes > 1:
            here = torch.tensor([self.received], device=accelerator.device)
            self.received = int(accelerator.gather(here).max())
        return self.received > 0

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stops:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            raise PreemptedError(
                f"stopped by {signal.Signals(self.received).name} after step {state.global_step} of "
                f"{state.max_steps}; go on from {folder} with --resume-from-checkpoint auto.",
                128 + self.received,
            )


@contextlib.contextmanager
def stopping_on_signals(trainer: Any) -> Iterator[None]:
    """While the body trains, a signal ends it with a checkpoint and :class:`PreemptedError`."""
    if threading.current_thread() is not threading.main_thread():  # where signals cannot be caught
        yield
        return
    callback = _StopAtStep(trainer)

    def note(number: int, _: Any) -> None:
        callback.received = callback.received or number

    before = {number: signal.signal(number, note) for number in SIGNALS}
    trainer.add_callback(callback)
    try:
        yield
    finally:
        trainer.remove_callback(callback)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def without_jit_checkpoint(args: Any) -> Iterator[bool]:
    """Hide ``enable_jit_checkpoint`` from Trainer, which would catch the signal itself; whether it was asked for."""
    asked = bool(getattr(args, "enable_jit_checkpoint", False))
    if asked:
        args.enable_jit_checkpoint = False
    try:
        yield asked
    finally:
        if asked:
            args.enable_jit_checkpoint = True
