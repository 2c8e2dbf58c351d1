"""Before unlearning: how forget and retain gradients are coupled, and how neutral a mini-batch's direction really is.

Both are measured as for text (``rosu diagnose``, ``rosu audit orthogonality``), on images as they are and by
BatchNorm's running statistics.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..analysis.coupling.diagnosis import Diagnosis
from ..analysis.coupling.pairs import CouplingPlan
from ..analysis.coupling.recipe import measure_trainer
from ..analysis.orthogonality.audit import AuditSubject, OrthogonalityDocument, measure_orthogonality
from ..analysis.orthogonality.samples import AuditedSet, OrthogonalityPlan, default_sizes, summed_loss
from ..training.window import PARTS
from .batches import PlainImages
from .fit import QUIET, Bench, Progress
from .settings import VisionConfig
from .splits import Split
from .trainer import VisionTrainer

#: The smallest retain batch of an audit; sizes double from there.
SMALLEST = 64


def diagnose_vision(bench: Bench, asked: Mapping[str, Any], *, seed: int, steps: Progress) -> Diagnosis:
    """Coupling at full batch and by batch size.

    Args:
        asked: fields of :class:`~rosu_llm.analysis.coupling.pairs.CouplingPlan`; those that are None follow settings.
        seed: of the split and the draws.
        steps: is told how training the model goes, where it is not trained yet.
    """
    own, split = bench.arguments, bench.split(seed)
    follows = {
        "forget_batch_size": min(own.forget_batch_size, len(split.forget)),
        "retain_batch_size": min(own.retain_batch_size, len(split.retain)),
        "micro_batch_size": min(own.forget_batch_size, own.retain_batch_size),
        "full_batch": True,
        "seed": seed,
    }
    plan = CouplingPlan(**{**follows, **{key: value for key, value in asked.items() if value is not None}})
    parts = (PlainImages(split.forget), PlainImages(split.retain))
    return measure_trainer(_trainer(bench, split, seed, steps), *parts, plan, name=_name(bench, split))


def orthogonality_plan(
    bench: Bench, *, seed: int, pairs: int = 500, batch_sizes: Sequence[int] = ()
) -> OrthogonalityPlan:
    """What an audit of a split draws, checked.

    Args:
        batch_sizes: retain images per batch; empty for 64, 128, … as far as there are images.
    """
    split = bench.split(seed)
    smallest = SMALLEST if len(split.retain) >= 2 * SMALLEST else 1
    return OrthogonalityPlan(
        forget=len(split.forget),
        retain=len(split.retain),
        forget_batch=min(bench.arguments.forget_batch_size, len(split.forget)),
        sizes=tuple(batch_sizes) or default_sizes(len(split.retain), smallest),
        pairs=pairs,
        seed=seed,
    ).checked()


def audit_vision(
    bench: Bench, plan: OrthogonalityPlan, out: Path, progress: Callable[[str, int, int], None]
) -> OrthogonalityDocument | None:
    """ε_orth of mini-batches of growing size: how far from neutral for all retain images their direction is."""
    own, split = bench.arguments, bench.split(plan.seed)
    trainer = _trainer(bench, split, plan.seed, lambda done, total: progress("training", done, total))
    sets = {}
    for part in PARTS:
        rows: Tensor = getattr(split, part)
        digest = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
        sets[part] = AuditedSet(np.ones(len(rows)), summed_loss(trainer, part, PlainImages(rows)), digest)
    data = {"forget_data": f"{_forgotten(bench, split)} of {own.data}", "retain_data": "the other images"}
    settings = {name: getattr(trainer.args, name) for name in ("bf16", "fp16", "tf32")}
    settings["pretrain_seed"] = own.pretrain_seed
    subject = AuditSubject(_name(bench, split), bench.identity, data, settings)
    return measure_orthogonality(trainer, sets, plan, subject, out, progress)


def _trainer(bench: Bench, split: Split, seed: int, steps: Progress) -> VisionTrainer:
    """At the model before unlearning."""
    config = VisionConfig(
        **{**QUIET, **bench.common}, output_dir=str(bench.folder), method="rosu", seed=seed, max_steps=1
    )
    return bench.unlearner(bench.learned(steps), split, bench.arguments, config)


def _forgotten(bench: Bench, split: Split) -> str:
    return "one class" if split.forgotten_class is not None else f"random {bench.arguments.forget_share:.0%}"


def _name(bench: Bench, split: Split) -> str:
    own = bench.arguments
    return f"{own.model} of width {own.width} after {own.pretrain_epochs} epochs, {_forgotten(bench, split)}"
