"""``measure_coupling``: the coupling diagnosis as a function, with a result that prints and writes itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from ..analysis.coupling.diagnosis import Diagnosis
from ..analysis.coupling.measure import measure_model
from ..analysis.coupling.pairs import RHOS, CouplingPlan
from ..data.pairing import ForgetRetainCollator
from ..training.config import MethodArguments
from .coupling import print_diagnosis, write_diagnosis


class ShownDiagnosis(Diagnosis):
    """A diagnosis with ``show`` and ``save``."""

    def show(self) -> None:
        """Print the tables and the advice."""
        print_diagnosis(self.document)

    def save(self, folder: str | Path) -> list[Path]:
        """Write diagnosis.json, diagnosis.md and, with matplotlib, its figures; returns what was written."""
        return write_diagnosis(self.document, Path(folder))


def measure_coupling(
    model: nn.Module,
    forget: Any,
    retain: Any,
    *,
    pairs: int = 16,
    forget_batch_size: int = 8,
    retain_batch_size: int = 8,
    micro_batch_size: int | None = None,
    rhos: Sequence[float] = RHOS,
    rho: float | None = None,
    points: int = 8,
    full_batch: bool = False,
    seed: int = 0,
    method_args: MethodArguments | None = None,
    collator: Callable[[Sequence[Any]], Any] | None = None,
    progress: bool = True,
) -> ShownDiagnosis:
    """Coupling of two data sets at the model's weights, over seeded mini-batch pairs; changes nothing.

    Args:
        model: a model, or one wrapped in DDP, sharded by FSDP2, or a DeepSpeed ZeRO engine; then all processes call
            this with the same arguments. Only trainable parameters take part (with LoRA: the adapter).
        forget, retain: data sets of tokenised samples (``input_ids``, ``labels``), e.g. ``QuestionAnswerDataset``.
        pairs, forget_batch_size, retain_batch_size, micro_batch_size, rhos, rho, points, full_batch, seed: see
            :class:`~rosu_llm.analysis.coupling.pairs.CouplingPlan`.
        method_args: losses, their options, reduction, τ and ε_q; ``ROSUConfig`` or ``MethodArguments``.
        collator: samples → batch; pads with token 0 (masked) unless given.
        progress: show a progress bar.

    Returns:
        The figures as ``.document``, one sentence as ``.advice``; ``.show()`` prints and ``.save(folder)`` writes them.
    """
    given = locals() | {"rhos": tuple(rhos)}
    plan = CouplingPlan(**{field.name: given[field.name] for field in fields(CouplingPlan)})
    samples, settings = {"forget": forget, "retain": retain}, method_args or MethodArguments()
    collator = collator or ForgetRetainCollator()
    found = measure_model(model, samples, plan, settings, collator=collator, progress=progress)
    return ShownDiagnosis(**{field.name: getattr(found, field.name) for field in fields(Diagnosis)})
