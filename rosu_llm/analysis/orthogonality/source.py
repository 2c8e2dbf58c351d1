"""Where an audit's gradients come from: the model of a trainer that is about to begin, by the route that fits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import ConfigError, unknown
from ...losses import COUNT
from ...space import LocalSpace, ParameterSpace
from ...training.trainer import ROSUMixin
from .gradients import PairSource, Part, Progress, Recomputed
from .per_sample import PerSample, gram_matrix, load_matrix, needed_bytes, sample_gradients, save_matrix

PER_SAMPLE = ("auto", "yes", "no")


def units_of(trainer: ROSUMixin, part: str, samples: Sequence[Any]) -> list[float]:
    """Of every sample, what its loss is a sum over."""
    count = COUNT[trainer.method_args.loss(part).unit]
    return [float(count(trainer.data_collator([sample]))) for sample in samples]


def digest(samples: Sequence[Mapping[str, Any]]) -> str:
    """What identifies tokenised samples."""
    total = hashlib.sha256()
    for sample in samples:
        parts = [list(map(int, sample.get(key, ()))) for key in ("input_ids", "labels", "attention_mask")]
        total.update(json.dumps(parts).encode())
    return total.hexdigest()


class TrainerGradients:
    """The two sets as a prepared trainer sees them, with dropout off."""

    def __init__(self, trainer: ROSUMixin, samples: Mapping[str, Sequence[Any]], progress: Progress) -> None:
        self._trainer, self._samples, self._progress = trainer, samples, progress
        self._space: ParameterSpace = trainer.parameter_space()

    def route(self, wanted: str, begun: str | None) -> str:
        """``per_sample`` or ``recompute``; an audit that has ``begun`` goes on by its route unless told otherwise."""
        if wanted not in PER_SAMPLE:
            raise unknown("--per-sample", wanted, PER_SAMPLE)
        fp16 = self._trainer.accelerator.mixed_precision == "fp16"
        space = self._space if self._trainer.layout == "local" and not fp16 else None
        if wanted == "yes" and space is None:
            raise ConfigError(
                "--per-sample yes keeps the gradients of all samples in one process and without loss scaling: leave "
                "it out under several processes, sharding or fp16."
            )
        if wanted == "auto" and begun is not None:
            return begun
        if wanted == "auto":
            wanted = "yes" if isinstance(space, LocalSpace) and self._fits(space) else "no"
        return "per_sample" if wanted == "yes" else "recompute"

    def _fits(self, space: LocalSpace) -> bool:
        import psutil

        needed = needed_bytes(sum(map(len, self._samples.values())), space)
        return bool(needed <= psutil.virtual_memory().available // 2)

    def source(self, route: str, matrix_file: Path, tag: str) -> PairSource:
        """The full retain gradient by one pass, or all inner products by one pass per sample (kept as ``tag``)."""
        self._trainer.model_wrapped.eval()
        self._trainer.compute_references(self._trainer.model_wrapped)
        parts = {name: self._part(name) for name in ("forget", "retain")}
        if route == "per_sample":
            assert isinstance(self._space, LocalSpace)
            matrix = load_matrix(matrix_file, tag)
            if matrix is None:
                matrix = gram_matrix(sample_gradients(self._space, parts, self._progress), self._progress)
                save_matrix(matrix_file, matrix, tag)
            return PerSample(matrix, parts["forget"].units, parts["retain"].units)
        state, size = self._trainer.accelerator, self._trainer.args.train_batch_size
        rank, world = state.process_index, state.num_processes
        recomputed = Recomputed(self._space, parts, micro_batch=size, rank=rank, world=world)
        recomputed.stream_full(self._progress)
        return recomputed

    def _part(self, name: str) -> Part:
        trainer, data = self._trainer, self._samples[name]
        loss = trainer.window_loss(name)

        def summed(numbers: Sequence[int]) -> torch.Tensor:
            batch = trainer.to_device(trainer.data_collator([data[i] for i in numbers]))
            return loss.share(trainer.model_wrapped, batch, 1.0)()

        return Part(np.array(units_of(trainer, name, data)), summed)
