"""Coupling of a forget split with what is kept, at full batch and by batch size, before unlearning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..analysis.coupling.diagnosis import Diagnosis
from ..analysis.coupling.pairs import CouplingPlan
from ..analysis.coupling.recipe import measure_trainer
from .batches import PlainImages
from .fit import QUIET, Bench, Progress
from .settings import VisionConfig


def diagnose_vision(bench: Bench, asked: Mapping[str, Any], *, seed: int, steps: Progress) -> Diagnosis:
    """Measured as ``rosu diagnose`` does, on images as they are and by BatchNorm's running statistics.

    Args:
        asked: fields of :class:`~rosu_llm.analysis.coupling.pairs.CouplingPlan`; those that are None follow settings.
        seed: of the split and the draws.
    """
    own = bench.arguments
    model, split = bench.learned(steps), bench.split(seed)
    config = VisionConfig(
        **{**QUIET, **bench.common}, output_dir=str(bench.folder), method="rosu", seed=seed, max_steps=1
    )
    trainer = bench.unlearner(model, split, own, config)
    follows = {
        "forget_batch_size": min(own.forget_batch_size, len(split.forget)),
        "retain_batch_size": min(own.retain_batch_size, len(split.retain)),
        "micro_batch_size": min(own.forget_batch_size, own.retain_batch_size),
        "full_batch": True,
        "seed": seed,
    }
    plan = CouplingPlan(**{**follows, **{key: value for key, value in asked.items() if value is not None}})
    what = "one class" if split.forgotten_class is not None else f"random {own.forget_share:.0%}"
    name = f"{own.model} of width {own.width} after {own.pretrain_epochs} epochs, {what}"
    parts = (PlainImages(split.forget), PlainImages(split.retain))
    return measure_trainer(trainer, *parts, plan, name=name)
