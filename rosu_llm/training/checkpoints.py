"""Checkpoints, model files and the model card, written so that a killed run never leaves half of one.

A run can be killed while it writes or deletes. A checkpoint carries a marker from before its first byte until after
its last one; resuming passes over marked ones, and over those that lack a part. Old ones are deleted only once the
new one is whole. Model files are written beside their destination and renamed into it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..errors import ConfigError
from ..files import write_atomically
from ..step import Calibration, UnlearningStep
from .best import Best
from .budget import Budget
from .config import MethodArguments
from .depth import TARGETS_FILE, Bound
from .drift import DRIFT_FILE, Drift
from .model_card import model_card
from .references import INITIAL_FILE, REFERENCE_FILE, References

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

MARKER = "incomplete"
STATE_FILE = "rosu_state.json"
THETA_FILE = "rosu_theta.safetensors"
#: The remembered retain gradient, one file for each process that holds a part of its own.
MEMORY_FILE = "rosu_memory_{rank}.safetensors"

_NAME = re.compile(r"checkpoint-(\d+)")
_STATE = "trainer_state.json"
#: Any of these is a model: whole, an adapter, FSDP's, DeepSpeed's, representation level's. Sharded ones have an index.
_MODELS = (
    "model.safetensors",
    "pytorch_model.bin",
    "adapter_model.*",
    "*/adapter_model.*",
    "pytorch_model_fsdp*",
    "global_step*",
    THETA_FILE,
)
_OPTIMIZERS = ("*optimizer*", "global_step*")
_SCHEDULERS = ("scheduler.pt", "global_step*")


def save_memory(memory: Mapping[str, Sequence[Tensor]], path: Path) -> None:
    """Write remembered gradients."""
    tensors = {f"{name}.{i}": t.cpu().contiguous() for name, own in memory.items() for i, t in enumerate(own)}
    save_file(tensors, path)


def load_memory(path: Path, device: torch.device) -> dict[str, list[Tensor]]:
    """Read what :func:`save_memory` wrote."""
    memory: dict[str, dict[int, Tensor]] = {}
    for key, tensor in load_file(path).items():
        name, _, place = key.rpartition(".")
        # A copy: where a tensor lies in memory decides how its sums round, and in the file it lies anywhere.
        memory.setdefault(name, {})[int(place)] = tensor.to(device, copy=True)
    return {name: [own[i] for i in sorted(own)] for name, own in memory.items()}


@contextlib.contextmanager
def marked(folder: Path, writer: bool) -> Iterator[None]:
    """Mark ``folder`` as unfinished while the body writes into it (on the writing process)."""
    marker = folder / MARKER
    if writer:
        folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
    yield
    if writer:
        marker.unlink(missing_ok=True)


def last_complete(folder: Path, *, resumable: bool = False) -> Path | None:
    """The newest whole checkpoint in a run's folder; ``resumable``: among those with an optimizer's state."""
    for path in reversed(_checkpoints(folder)):
        if _defect(path, resumable=resumable) is None:
            return path
    return None


def in_checkpoint(path: Path, folder: Path) -> bool:
    """Whether ``path`` is or lies in one of the checkpoints of a run's folder, both as absolute paths."""
    return folder in path.parents and _NAME.fullmatch(path.relative_to(folder).parts[0]) is not None


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a run's folder, whole or not, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), p) for p in folder.iterdir() if p.is_dir() and (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def _defect(path: Path, *, resumable: bool) -> str | None:
    """Why ``path`` is no whole checkpoint; None where it is one."""
    if (path / MARKER).exists():
        return "was not written to the end (the run was killed while saving)"
    if not (path / _STATE).is_file():
        return f"is no checkpoint (it has no {_STATE})"
    if not _has_model(path):
        return "holds no model (part of it was deleted)"
    if broken := _broken(path):
        return f"holds a {broken} that is broken or cut short"
    if resumable and not (_any(path, _OPTIMIZERS) and _any(path, _SCHEDULERS)):
        return "holds no optimizer state (it is a finished run's model, or was saved with save_only_model)"
    return None


def _broken(path: Path) -> str | None:
    """The first file that cannot be read, told from its beginning and end: a full disk or a copy that was cut short."""
    for file in sorted(path.iterdir()):
        try:
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
            elif file.suffix == ".safetensors":
                with safe_open(str(file), "pt"):
                    pass
            elif file.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(file):
                return file.name
        except (ValueError, OSError, SafetensorError):
            return file.name
    return None


def _has_model(path: Path) -> bool:
    try:
        indexes = [json.loads(index.read_text(encoding="utf-8")) for index in path.glob("*.index.json")]
        shards = {shard for index in indexes for shard in index["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((path / shard).is_file() for shard in shards) if shards else _any(path, _MODELS)


def _any(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(path.glob(pattern), None) is not None for pattern in patterns)


def rotate(newest: Path, limit: int | None, best: str | None = None) -> None:
    """Keep ``limit`` checkpoints beside and including ``newest``; broken ones go first, ``best`` never."""
    every = _checkpoints(newest.parent) if limit is not None and limit > 0 else []
    spared = {newest.resolve(), *([Path(best).resolve()] if best else [])}
    others = [path for path in every if path.resolve() not in spared]
    others.sort(key=lambda path: _defect(path, resumable=False) is None)
    for path in others[: max(0, len(every) - (limit or 0))]:
        _delete(path)


def remove_all(folder: Path) -> None:
    """Delete every checkpoint of a run, so that a new one in the same folder cannot be confused with it."""
    for path in _checkpoints(folder):
        _delete(path)


def _delete(path: Path) -> None:
    # Killed half-way, what is left must not look like a checkpoint: its state goes first. One that may not be deleted
    # stays, as with Trainer.
    with contextlib.suppress(OSError):
        (path / _STATE).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def resolve_resume(value: str | bool | None, output_dir: str) -> str | None:
    """What ``resume_from_checkpoint`` stands for: a whole checkpoint or nothing; ``auto``: the newest, if any."""
    if not value:
        return None
    if value is True or value == "auto":
        found = last_complete(Path(output_dir), resumable=True)
        if found is None and value == "auto":
            return None
        if found is None:
            raise ConfigError(
                f"resume_from_checkpoint=True, but {output_dir!r} holds no complete checkpoint with an optimizer's "
                "state. Start without it, write auto to begin where there is none, or give the path of a checkpoint."
            )
        return str(found)
    path = Path(value)
    if not path.is_dir():
        raise ConfigError(f"resume_from_checkpoint={value!r} is not a folder.")
    defect = _defect(path, resumable=True)
    if defect is not None:
        raise ConfigError(
            f"resume_from_checkpoint={value!r} {defect}. Give a folder named checkpoint-N, or true for the newest "
            "complete one of output_dir."
        )
    return str(path)


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A scratch folder whose files replace those in ``folder`` once all are written; index files last."""
    stage = folder / ".saving"
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    try:
        yield stage
        for path in sorted(stage.iterdir(), key=lambda p: (p.name.endswith(".index.json"), p.name)):
            target = folder / path.name
            if path.is_dir():
                shutil.rmtree(target, ignore_errors=True)
            os.replace(path, target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextlib.contextmanager
def numpy_state_allowed() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` read the arrays of numpy's random state; nothing else is allowed in."""
    import numpy
    import torch

    allow = getattr(torch.serialization, "safe_globals", None)
    if allow is None:  # torch < 2.5
        yield
        return
    core = getattr(numpy, "_core", None) or numpy.core
    types = [core.multiarray._reconstruct, numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32))]
    with allow(types):
        yield


class Saving(Base):  # type: ignore[misc]
    """Trainer's saving with a marker on unfinished checkpoints, the method's state, and staged model files."""

    method_args: MethodArguments
    _references: References
    _calibration: Calibration | None
    _bound: Bound | None
    _budget: Budget | None
    _drift: Drift | None
    _best: Best | None
    layout: str
    _step: UnlearningStep | None
    _metrics: dict[str, list[float]]
    #: What a checkpoint says about its run, so that resuming can tell whether it is the same one.
    run_settings: Mapping[str, Any] | None = None
    _limit: int | None = None

    def _save_checkpoint(self, model: nn.Module, trial: Any, *args: Any, **kwargs: Any) -> None:
        """Trainer's, but old checkpoints are deleted after the new one is whole: killed in between, one is left."""
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        self._limit = self.args.save_total_limit
        with _limited(self.args, None), marked(folder, writer=self.args.should_save):
            if self.args.should_save:
                self._save_method(folder)
            if self.args.should_save or self._note_rank():
                self._save_notes(folder)
            super()._save_checkpoint(model, trial, *args, **kwargs)
            # Every rank writes its shards and random state: the checkpoint is whole when the last one has.
            self.accelerator.wait_for_everyone()
        if self.args.should_save:
            rotate(folder, self._limit, self.state.best_model_checkpoint)

    def _note_rank(self) -> int:
        raise NotImplementedError

    def _save_notes(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)  # the process that marks it may come later
        if self._budget is not None:
            self._budget.save(folder, self._note_rank())
        if self._best is not None:
            self._best.save(folder, self._note_rank())
        if self._step is not None and self._step.space.memory:
            save_memory(self._step.space.memory, folder / MEMORY_FILE.format(rank=self._note_rank()))

    def _save_method(self, folder: Path) -> None:
        if self._references.logprobs.values:
            self._references.logprobs.save(folder / REFERENCE_FILE)
        if self._bound is not None and self._bound.targets.values:
            self._bound.targets.save(folder / TARGETS_FILE)
        if self._references.states is not None and self._references.states.known:
            self._references.states.save(folder / INITIAL_FILE)
        if self._drift is not None and self._drift.known:
            self._drift.save(folder / DRIFT_FILE)
        state: dict[str, Any] = {}
        if self._calibration is not None:
            state["calibrate_target"] = self._calibration.target
        if self._budget is not None:
            state["budget"] = self._budget.state()
        if self._best is not None:
            state["best"] = self._best.state()
        if self._bound is not None:
            state["depth_start"] = self._bound.depth.start
        if self._step is not None and self._step.radius is not None:
            state["radius"] = (self._step.radius.rho, self._step.radius.size)
        if self._step is not None and self._step.sweep is not None:
            state["sweep"] = self._step.sweep.counts
        if self._metrics:  # of steps since the last log: minima over a log's steps survive a resumption
            state["since_last_log"] = self._metrics
        if self.run_settings is not None:
            state["settings"] = self.run_settings
        if state:
            write_atomically(folder / STATE_FILE, json.dumps(state))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's, which writes no model at all when FSDP checkpoints are sharded: gather one here."""
        if not _internal_call and self._writes_sharded_checkpoints():
            state = self.accelerator.get_state_dict(self.model)  # collective; whole only on the main process
            if self.args.should_save:
                self._save(output_dir or self.args.output_dir, state_dict=state)
        super().save_model(output_dir, _internal_call)

    def _writes_sharded_checkpoints(self) -> bool:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        return plugin is not None and "FULL_STATE_DICT" not in str(plugin.state_dict_type)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self.args.should_save:
            super()._save(output_dir, state_dict)
            return
        limit = self.args.save_total_limit or self._limit  # the arguments are written too, as the user gave them
        with staged(Path(output_dir or self.args.output_dir)) as stage, _limited(self.args, limit):
            super()._save(str(stage), state_dict)

    def save_state(self) -> None:
        """``trainer_state.json`` with all logs, beside the model."""
        if self.is_world_process_zero():
            path = Path(self.args.output_dir) / "trainer_state.json"
            write_atomically(path, json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True) + "\n")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # transformers before 4.47 loads numpy's random state without allowing its types, which torch ≥ 2.6 refuses.
        with numpy_state_allowed():
            super()._load_rng_state(checkpoint)

    def last_checkpoint(self) -> str | None:
        """The newest complete checkpoint of this run, if any."""
        found = last_complete(Path(self.args.output_dir))
        return None if found is None else str(found)

    def create_model_card(self, model_name: str | None = None, tags: Any = None, **_: Any) -> None:
        """Write README.md: method, settings, versions, last logged values."""
        if not self.is_world_process_zero():
            return
        import transformers

        logged: Mapping[str, Any] = next((entry for entry in reversed(self.state.log_history) if "loss" in entry), {})
        config = getattr(self.model, "config", None)
        text = model_card(
            name=model_name or Path(self.args.output_dir).name,
            base_model=getattr(config, "_name_or_path", None) or None,
            settings={**self.method_args.method_dict(), **_training_summary(self.args)},
            versions={"torch": torch.__version__, "transformers": transformers.__version__},
            metrics={k: v for k, v in logged.items() if isinstance(v, (int, float))},
            tags=[tags] if isinstance(tags, str) else list(tags or []),
        )
        write_atomically(Path(self.args.output_dir) / "README.md", text)


@contextlib.contextmanager
def _limited(args: Any, limit: int | None) -> Iterator[None]:
    """Another ``save_total_limit`` for a while."""
    before, args.save_total_limit = args.save_total_limit, limit
    try:
        yield
    finally:
        args.save_total_limit = before


def _training_summary(args: Any) -> dict[str, Any]:
    names = ("learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "seed")
    return {name: getattr(args, name) for name in names}
