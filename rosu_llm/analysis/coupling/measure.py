"""``measure_coupling``: where between orthogonal and parallel do forget and retain gradients stand, before any step.

Changes nothing: weights, ``.grad``, random state and training mode are afterwards what they were. Dropout is off, so
that a difference of two losses is an effect of the perturbation.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...data.pairing import ForgetRetainCollator
from ...errors import NonFiniteError
from ...geometry import Stabilizer
from ...space import ParameterSpace
from ...space.select import average_over_ranks, layout_name, select_space
from ...step.replay import RandomState, frozen_statistics
from ...training.config import MethodArguments
from ...training.window import PARTS
from .diagnosis import Diagnosis
from .losses import PlainLosses
from .pair import PairRecord
from .pair_meter import PairMeter
from .parts import Layout, PartStatistics
from .windows import RHOS, Plan, Windows

logger = logging.getLogger(__name__)


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
    seed: int = 0,
    method_args: MethodArguments | None = None,
    collator: Callable[[Sequence[Any]], Any] | None = None,
    progress: bool = True,
) -> Diagnosis:
    """Coupling of two data sets at the model's weights, over seeded mini-batch pairs.

    Args:
        model: a model, or one wrapped in DDP, sharded by FSDP2, or a DeepSpeed ZeRO engine; then all processes call
            this with the same arguments. Only trainable parameters take part (with LoRA: the adapter).
        forget, retain: data sets of tokenised samples (``input_ids``, ``labels``), e.g. ``QuestionAnswerDataset``.
        pairs, forget_batch_size, retain_batch_size, micro_batch_size, rhos, rho, points, seed: see
            :class:`~rosu_llm.analysis.coupling.windows.Plan`.
        method_args: losses, their options, reduction, τ and ε_q; ``ROSUConfig`` or ``MethodArguments``.
        collator: samples → batch; pads with token 0 (masked) unless given.
        progress: show a progress bar.

    Returns:
        A :class:`~rosu_llm.analysis.coupling.diagnosis.Diagnosis`: ``.advice``, ``.document``, ``.show()``,
        ``.save(folder)``.
    """
    settings = method_args or MethodArguments()
    settings.check_method()
    plan = Plan(
        pairs=pairs,
        forget_batch_size=forget_batch_size,
        retain_batch_size=retain_batch_size,
        micro_batch_size=micro_batch_size,
        rhos=tuple(rhos),
        rho=rho,
        points=points,
        seed=seed,
    )
    space, layout = select_space(model), layout_name(model)
    spread = layout != "local"
    device = next(model.parameters()).device
    mean = _averager(device) if spread else _alone
    losses = PlainLosses(model, settings, mean, layout)
    windows = Windows(
        model,
        {"forget": forget, "retain": retain},
        {part: losses.of(part) for part in PARTS},
        plan,
        collator or ForgetRetainCollator(),
        _mover(device),
        rank=torch.distributed.get_rank() if spread else 0,
        world=torch.distributed.get_world_size() if spread else 1,
    )
    setup = {"model": getattr(getattr(model, "config", None), "name_or_path", None) or None, "layout": layout}
    return measure_windows(
        windows,
        space,
        settings,
        setup=setup,
        mean_over_ranks=mean,
        before=lambda: losses.compute_references(windows),
        progress=progress,
    )


def measure_windows(
    windows: Windows,
    space: ParameterSpace,
    settings: MethodArguments,
    *,
    setup: Mapping[str, Any],
    mean_over_ranks: Callable[[Tensor], Tensor],
    compute_dtype: torch.dtype | None = None,
    before: Callable[[], None] = lambda: None,
    after_pair: Callable[[], None] = lambda: None,
    progress: bool = True,
) -> Diagnosis:
    """The measurement itself, for losses and a space that exist already (those of a trainer)."""
    model, plan = windows.model, windows.plan
    parts = Layout.of(model)
    statistics = PartStatistics(parts)
    records: list[PairRecord] = []
    skipped: list[dict[str, Any]] = []
    held = 0
    with _unchanged(model, space):
        before()
        _without_dropout(model)
        meter = PairMeter(
            space,
            parts,
            plan.measured,
            stabilizer=Stabilizer(settings.tau, settings.tau_mode),
            eps_q=settings.eps_q,
            devices={p.device for p in model.parameters()},
            mean_over_ranks=mean_over_ranks,
            dtype=compute_dtype or next(p.dtype for p in model.parameters() if p.requires_grad),
        )
        for pair in _bar(plan.pairs, progress and windows.rank == 0):
            try:
                record, products = meter.measure(pair, *(windows.closures(part, pair) for part in PARTS))
            except NonFiniteError as error:
                skipped.append({"pair": pair, "reason": str(error)})
                logger.warning("Pair %d of %d is left out: %s.", pair, plan.pairs, error)
                continue
            finally:
                held = max(held, space.held_bytes())
                after_pair()
            records.append(record)
            statistics.add(products)
    if not records:
        raise NonFiniteError(
            f"No pair could be measured; in pair {skipped[0]['pair']} {skipped[0]['reason']}. Check the model's "
            "weights and the data, compute in float32, or give smaller rhos."
        )
    arrived = min((ray.realized for record in records for ray in record.rays() or ()), default=1.0)
    if arrived < 0.5:
        logger.warning(
            "Only %.0f %% of the smallest perturbation survived rounding to the type the model computes in: what was "
            "measured there is noise. Give larger rhos, or compute in float32.",
            100.0 * arrived,
        )
    described = {
        **setup,
        "forget_samples": len(windows.samples["forget"]),
        "retain_samples": len(windows.samples["retain"]),
        "parameters": sum(parts.sizes),
        "processes": windows.world,
        "held_bytes": held,
    }
    return Diagnosis(plan, settings, described, records, skipped, statistics)


@contextlib.contextmanager
def _unchanged(model: nn.Module, space: ParameterSpace) -> Iterator[None]:
    """Mode, ``.grad``, running statistics and random state come out as they went in."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    random = RandomState.now({p.device for p in model.parameters()})
    try:
        with frozen_statistics(model):
            yield
    finally:
        space.begin()
        space.release()
        for module, mode in modes:
            module.training = mode
        for p, gradient in gradients:
            p.grad = gradient
        random.restore()


def _without_dropout(model: nn.Module) -> None:
    """Evaluation mode; but checkpointed layers drop activations in training mode only, and large models need that."""
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def _bar(pairs: int, shown: bool) -> Iterator[int]:
    from rich.progress import track

    yield from track(range(1, pairs + 1), description="pairs", total=pairs, disable=not shown, transient=True)


def _mover(device: torch.device) -> Callable[[Any], Any]:
    return lambda batch: {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def _alone(values: Tensor) -> Tensor:
    return values


def _averager(device: torch.device) -> Callable[[Tensor], Tensor]:
    def mean(values: Tensor) -> Tensor:
        moved = values.to(device, copy=True)
        average_over_ranks(moved)
        return moved.cpu()

    return mean
