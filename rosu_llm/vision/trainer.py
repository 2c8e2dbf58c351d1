"""``VisionTrainer``: ROSUTrainer with SGD as image classifiers are trained, and the rules for BatchNorm.

In a pass at w, BatchNorm normalises by the batch at hand. Running statistics, by which the model is evaluated, move in
the retain pass at w alone (:mod:`rosu_llm.step.engine`). ``batch_norm="joint"`` sends forget and retain images through
the model together, as UAM does, so that both losses see the statistics of both. ``"eval"`` uses the running statistics
throughout: then a loss is a sum over images, and windows may be cut and spread at will.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ..errors import ConfigError, DataError
from ..step import Closure, Outcome
from ..training.trainer import ROSUTrainer
from ..training.window import WindowLoss
from .models import has_batch_norm
from .settings import VisionConfig


class VisionTrainer(ROSUTrainer):
    """Unlearn, train or retrain an image classifier."""

    _config_class = VisionConfig
    _batch_keys = ("pixel_values", "labels")
    args: VisionConfig
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, model: Any, args: VisionConfig, **kwargs: Any) -> None:
        if not isinstance(args, VisionConfig):
            raise ConfigError(f"args is a {type(args).__name__} without the settings of images: pass VisionConfig(…).")
        check_batch_size(model, args, kwargs.get("train_dataset"))
        super().__init__(model, args, **kwargs)

    def create_optimizer(self, *_: Any) -> torch.optim.Optimizer:
        """SGD with momentum, and weight decay on all parameters."""
        if self.optimizer is None:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.SGD(
                trained,
                lr=self.args.learning_rate,
                momentum=self.args.momentum,
                weight_decay=self.args.weight_decay,
            )
        made: torch.optim.Optimizer = self.optimizer
        return made

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Trainer's, or η/10 from each of ``lr_drops`` on."""
        drops = [share * num_training_steps for share in self.args.lr_drops]
        if not drops or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: 0.1 ** sum(step >= at for at in drops))
        return self.lr_scheduler

    def window_loss(self, part: str) -> WindowLoss:
        """With ``batch_norm="eval"`` every forward uses the running statistics."""
        loss = super().window_loss(part)
        return self._by_running_statistics(loss) if self.args.batch_norm == "eval" else loss

    def _by_running_statistics(self, loss: WindowLoss) -> WindowLoss:
        inside = loss.forward_context

        @contextmanager
        def both() -> Iterator[None]:
            with running_statistics(self.model), inside():
                yield

        return replace(loss, forward_context=both)

    def _sample_closures(
        self, model: nn.Module, batches: Sequence[Mapping[str, Any]], part: str = "retain", count: int | None = None
    ) -> list[Closure]:
        """Of single images, which have no statistics of their own: by the running ones."""

        def single(closure: Closure) -> Closure:
            def run() -> Tensor:
                with running_statistics(model):
                    return closure()

            return run

        return [single(closure) for closure in super()._sample_closures(model, batches, part, count)]

    def _forget_batches(self) -> Iterator[Mapping[str, Any]]:
        """Each forget image once; an epoch of pairs shows it several times."""
        return self._batches(self.train_dataset.forgotten)

    def _update(self, model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> Outcome:
        """The step's gradient, and with ``l1`` that of γ_t‖w‖₁ added to it, γ_t = γ(1 − t/T)."""
        outcome = super()._update(model, batches)
        strength = self.args.l1 * (1.0 - self.state.global_step / max(self.state.max_steps, 1))
        if strength > 0.0:
            with torch.no_grad():
                for group in self.raw_optimizer().param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            p.grad.add_(p.sign(), alpha=strength)
        return outcome


@contextmanager
def running_statistics(model: nn.Module) -> Iterator[None]:
    """BatchNorm layers normalise by their running statistics, and leave them as they are."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True


def check_statistics(model: Any, sizes: Mapping[str, int], instead: str = "") -> None:
    """Raise for a model with BatchNorm where one of the named batches holds a single image."""
    if isinstance(model, nn.Module) and has_batch_norm(model):
        for name, size in sizes.items():
            if size == 1:
                raise ConfigError(
                    f"{name}=1: BatchNorm normalises over the batch, and one image has no statistics: give at least 2"
                    + (f", {instead}." if instead else ".")
                )


def check_batch_size(model: Any, args: VisionConfig, dataset: Any) -> None:
    """Raise for batches that BatchNorm, or an epoch, cannot be made of."""
    size = args.per_device_train_batch_size
    if args.batch_norm != "eval":
        check_statistics(model, {"per_device_train_batch_size": size}, "or batch_norm='eval'")
    if dataset is not None and args.dataloader_drop_last and len(dataset) < size * args.world_size:
        raise DataError(
            f"An epoch has {len(dataset)} pairs, fewer than one batch of {size} on {args.world_size} processes: lower "
            "the batch sizes."
        )
