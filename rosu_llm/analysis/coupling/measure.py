"""Where between orthogonal and parallel are forget and retain gradients, before any step?

Nothing is changed: weights, ``.grad``, random state and training mode are restored. Dropout is off, so that a
difference between two losses is an effect of the perturbation.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from ...errors import ConfigError, NonFiniteError
from ...space import ParameterSpace
from ...space.replay import RandomState, frozen_statistics
from ...space.select import average_over_ranks, layout_name, select_space
from ...training.config import MethodArguments
from ...training.ranks import Ranks
from ...training.references import References
from ...training.window import PARTS
from .diagnosis import Diagnosis
from .full_batch import measure_full_batch
from .meter import PairMeter
from .pairs import CouplingPlan, PairWindows
from .record import PairRecord

logger = logging.getLogger(__name__)


def measure_model(
    model: nn.Module,
    samples: dict[str, Any],
    plan: CouplingPlan,
    settings: MethodArguments,
    *,
    collator: Callable[[Sequence[Any]], Any],
    progress: bool = True,
) -> Diagnosis:
    """Coupling of ``samples["forget"]`` and ``samples["retain"]`` at the weights of a model as it is wrapped.

    Losses that compare with the initial model compare with the model as it is now.
    """
    settings.check_method()
    space, layout = select_space(model), layout_name(model)
    spread = layout != "local"
    device = next(model.parameters()).device

    def mean_over_ranks(values: Tensor) -> Tensor:
        if not spread:
            return values
        moved = values.to(device, copy=True)
        average_over_ranks(moved)
        return moved.cpu()

    def to_device(batch: Any) -> Any:
        return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}

    if any(settings.loss(part).reference == "activations" for part in PARTS):
        raise ConfigError(
            "Losses of hidden activations need a trainer's layers: use 'rosu diagnose --config FILE' with "
            "forget_loss: representation, or another loss here."
        )
    references = References(settings, model, layout)
    here = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if spread else (0, 1)
    ranks = Ranks(*here, mean_over_ranks)
    windows = PairWindows(
        model,
        samples,
        {part: references.window_loss(part, mean_over_ranks) for part in PARTS},
        plan,
        collator,
        to_device,
        rank=ranks.rank,
        world=ranks.world,
    )

    def compute_references() -> None:
        """For the forget samples that will be drawn, one by one."""
        drawn = {i for pair in range(1, plan.pairs + 1) for i in windows.draw("forget", pair)}
        drawn.update(range(len(samples["forget"])) if plan.full_batch else ())
        share = (windows.batch("forget", [i]) for i, _ in ranks.share(sorted(drawn)))
        references.compute(model, lambda: share, ranks)

    name = getattr(getattr(model, "config", None), "name_or_path", None) or None
    return measure_windows(
        windows, space, settings, name=name, layout=layout, before=compute_references, progress=progress
    )


def measure_windows(
    windows: PairWindows,
    space: ParameterSpace,
    settings: MethodArguments,
    *,
    name: str | None,
    layout: str,
    compute_dtype: torch.dtype | None = None,
    before: Callable[[], None] = lambda: None,
    after_pair: Callable[[], None] = lambda: None,
    progress: bool = True,
) -> Diagnosis:
    """Measure every pair of ``windows`` in the parameter space.

    Args:
        settings: τ and ε_q.
        name, layout: of the model, for the result.
        compute_dtype: the type the forward pass rounds weights to (autocast).
        before: called once, before dropout is switched off.
        after_pair: called after every pair.
        progress: show a progress bar on the first process.
    """
    model, plan = windows.model, windows.plan
    records: list[PairRecord] = []
    skipped: list[dict[str, Any]] = []
    held = 0
    with _unchanged(model, space):
        before()
        model.eval()
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):  # recomputes activations in training mode only
                module.training = True
        dtype = compute_dtype or next(p.dtype for p in model.parameters() if p.requires_grad)
        meter = PairMeter(windows, space, settings, dtype)
        hidden = not progress or windows.rank != 0
        for pair in track(range(1, plan.pairs + 1), description="pairs", disable=hidden, transient=True):
            try:
                records.append(meter.measure(pair))
            except NonFiniteError as error:
                skipped.append({"pair": pair, "reason": str(error)})
                logger.warning("Pair %d of %d is left out: %s.", pair, plan.pairs, error)
            finally:
                held = max(held, space.held_bytes())
                after_pair()
        whole = measure_full_batch(meter, windows, after_pair, progress=not hidden) if plan.full_batch else None
        held = max(held, space.held_bytes())
    if not records:
        raise NonFiniteError(
            f"No pair could be measured; in pair {skipped[0]['pair']} {skipped[0]['reason']}. Check the model's "
            "weights and the data, compute in float32, or give smaller rhos."
        )
    realized = min((ray.realized for record in records for ray in record.rays or ()), default=1.0)
    if realized < 0.5:
        logger.warning(
            "Only %.0f %% of the smallest perturbation survived rounding to the type the model computes in: what was "
            "measured there is noise. Give larger rhos, or compute in float32.",
            100.0 * realized,
        )
    setup = {
        "model": name,
        "layout": layout,
        **{f"{part}_samples": len(windows.samples[part]) for part in PARTS},
        "parameters": sum(meter.parts.sizes),
        "processes": windows.world,
        "held_bytes": held,
    }
    return Diagnosis(plan, settings, setup, records, skipped, meter.parts, whole)


@contextlib.contextmanager
def _unchanged(model: nn.Module, space: ParameterSpace) -> Iterator[None]:
    """Restore mode, ``.grad``, running statistics and random state at the end."""
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
