"""What a recipe takes of memory and disk, from its model's configuration alone: no weight is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..compat import dtype_argument
from ..representation.config import RepresentationConfig
from ..representation.loading import shortened
from ..representation.names import check_target, layer_stack, text_config, trainable_names
from ..training.adapter import add_adapter
from ..training.config import ROSUConfig
from ..training.precision import prepare_precision
from ..training.preflight import Preflight, preflight
from ..training.window import PARTS
from .next_token import lora_config
from .prepare import check_config, not_loaded
from .settings import Recipe, RunArguments


@dataclass(frozen=True)
class Needs:
    """Bytes: of a training step, of what is saved at the end, and of all checkpoints that are there at once."""

    step: Preflight
    saved: int
    checkpoints: int

    @property
    def disk(self) -> int:
        """Model and checkpoints."""
        return self.saved + self.checkpoints


def estimate(recipe: Recipe) -> Needs:
    """The needs of a run on one process, activations not included."""
    from transformers import AutoConfig

    arguments, config = recipe
    arguments.check_run(())
    check_config(config)
    try:
        described = AutoConfig.from_pretrained(
            arguments.model_name_or_path, trust_remote_code=arguments.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise not_loaded(arguments, "configuration", error) from error
    saved: int | None = None
    if isinstance(config, RepresentationConfig):
        model, saved = _lower_layers(described, arguments, config)
    else:
        model = _whole(described, arguments, config)
    with _quiet():
        prepare_precision(model, upcast=config.upcast, autocast=True)
    trained = _size(p for p in model.parameters() if p.requires_grad)
    kept_whole = any(config.loss(part).reference == "logits" for part in PARTS) and arguments.lora_r is None
    reference = trained if recipe.representation_level else _size(model.parameters()) if kept_whole else 0
    step = preflight(model, config.rule(), _optimizer(model, config), reference)
    checkpoint = trained if saved is not None or arguments.lora_r is not None else _size(model.parameters())
    full = checkpoint + (0 if getattr(config, "save_only_model", False) else step.optimizer)
    strategy = getattr(config.save_strategy, "value", config.save_strategy)
    # one more than stay: the oldest is deleted after the newest is written
    count = 0 if strategy == "no" else 1 + (config.save_total_limit or 1)
    return Needs(step, checkpoint if saved is None else saved, count * full)


def _whole(described: Any, arguments: RunArguments, config: ROSUConfig) -> Any:
    """The model as it is trained, with its adapter."""
    from transformers import AutoModelForCausalLM

    model, adapter = _built(AutoModelForCausalLM, described, arguments), lora_config(arguments)
    return model if adapter is None else add_adapter(model, adapter, config.seed)


def _lower_layers(described: Any, arguments: RunArguments, config: RepresentationConfig) -> tuple[Any, int]:
    """The layers that are loaded, and the size of the whole model, which is saved."""
    from transformers import AutoModel, AutoModelForCausalLM

    check_target(config.target_layer, int(text_config(described).num_hidden_layers))
    model = _built(AutoModel, shortened(described, config.target_layer + 1), arguments)
    named = dict(model.named_parameters())
    stack = layer_stack(model, config.layer_stack)
    trained = trainable_names(named, config.trainable_parameters, stack, config.target_layer)
    for name, parameter in named.items():
        parameter.requires_grad_(name in trained)
    return model, _size(_built(AutoModelForCausalLM, described, arguments).parameters())


def _built(kind: Any, described: Any, arguments: RunArguments) -> Any:
    """A model without storage."""
    with torch.device("meta"):
        return kind.from_config(
            described,
            trust_remote_code=arguments.trust_remote_code,
            **dtype_argument(getattr(torch, arguments.dtype)),
        )


def _optimizer(model: Any, config: ROSUConfig) -> torch.optim.Optimizer:
    from transformers import Trainer

    made, options = Trainer.get_optimizer_cls_and_kwargs(config)
    optimizer: torch.optim.Optimizer = made([p for p in model.parameters() if p.requires_grad], **options)
    return optimizer


def _size(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning about upcasting, which is for those who train."""
    logger = logging.getLogger(prepare_precision.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
