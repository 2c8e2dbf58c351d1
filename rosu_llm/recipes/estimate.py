"""What a recipe takes of memory and disk, from its model's configuration alone: no weight is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..compat import dtype_argument
from ..errors import ConfigError, one_line
from ..representation.config import RepresentationConfig
from ..representation.loading import shortened
from ..representation.names import check_target, layer_index, layer_stack, names_below, text_config, trainable_names
from ..training.adapter import add_adapter
from ..training.chosen import train_only
from ..training.config import ROSUConfig
from ..training.precision import prepare_precision
from ..training.preflight import Preflight, capture_options, preflight
from ..training.window import PARTS
from .activations import pass_shape
from .next_token import lora_config
from .prepare import check_config, not_loaded
from .settings import Recipe, RunArguments
from .spreading import StepShape


@dataclass(frozen=True)
class Needs:
    """Bytes: of a training step, of what is saved at the end, and of all checkpoints that are there at once.

    ``shape`` is what the step is made of, for its activations and for other layouts.
    """

    step: Preflight
    saved: int
    checkpoints: int
    shape: StepShape

    @property
    def disk(self) -> int:
        """Model and checkpoints."""
        return self.saved + self.checkpoints


def estimate(recipe: Recipe) -> Needs:
    """The needs of a run on one process."""
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
    kept = {config.loss(part).reference for part in PARTS} if arguments.lora_r is None else set()
    reference = trained if recipe.representation_level else _size(model.parameters()) if "logits" in kept else 0
    whole = reference > 0
    if not whole and "distributions" in kept:
        reference = _size(model.get_output_embeddings().parameters())  # hidden states are in a file
    bf16 = config.bf16 or (recipe.representation_level and arguments.dtype == "bfloat16")
    step = preflight(model, config.rule(), _optimizer(model, config), reference, **capture_options(config), bf16=bf16)
    checkpoint = trained if saved is not None or arguments.lora_r is not None else _size(model.parameters())
    full = checkpoint + (0 if getattr(config, "save_only_model", False) else step.optimizer)
    strategy = getattr(config.save_strategy, "value", config.save_strategy)
    # one more than stay: the oldest is deleted after the newest is written
    count = 0 if strategy == "no" else 1 + (config.save_total_limit or 1)
    return Needs(
        step, checkpoint if saved is None else saved, count * full, _shape(recipe, model, described, step, whole)
    )


def micro_batch(recipe: Recipe) -> tuple[int, int]:
    """Tokens that a micro-batch may have at most, and the longest sample."""
    arguments, config = recipe
    given = arguments.max_length
    length = given if isinstance(given, int) else max(given)
    forget = config.loss("forget")
    both = forget.unit == "sequence" and forget.alternative != "none"  # an answer and a third one in one pass
    collated = config.per_device_train_batch_size * max(arguments.retain_per_forget, 1 + both) * length
    return max(length, config.micro_batch_tokens or collated), length


def _shape(recipe: Recipe, model: Any, described: Any, step: Preflight, whole: bool) -> StepShape:
    arguments, config = recipe
    tokens, _ = micro_batch(recipe)
    try:
        stack = layer_stack(model, getattr(config, "layer_stack", None))
    except ConfigError:  # no model that training refuses: what its layers take is left out
        stack = ""
    sizes: dict[int | None, int] = {}
    for name, parameter in model.named_parameters():
        at = layer_index(name, stack) if stack else None
        sizes[at] = sizes.get(at, 0) + parameter.numel()
    trained = [layer_index(name, stack) for name, p in model.named_parameters() if p.requires_grad and stack]
    first = min((at for at in trained if at is not None), default=0)
    head, embedding = getattr(model, "get_output_embeddings", lambda: None)(), model.get_input_embeddings()
    linear = {m.weight for m in model.modules() if isinstance(m, torch.nn.Linear) and m.weight.dtype == torch.float32}
    rule = config.rule()
    return StepShape(
        memory=step,
        work=pass_shape(
            described,
            layers=config.target_layer - first + 1 if isinstance(config, RepresentationConfig) else None,
            tokens=tokens,
            stream=embedding.weight.element_size(),
            bf16=step.bf16,
            checkpointing=config.gradient_checkpointing,
            adapter=arguments.lora_r is not None or recipe.representation_level,
            compiled=config.torch_compile,
        ),
        micro_batches=config.gradient_accumulation_steps,
        layer=max((size for at, size in sizes.items() if at is not None), default=0),
        outside=sizes.get(None, 0),
        tied=embedding.weight.numel() if head is not None and head.weight is embedding.weight else 0,
        copied=sum(weight.numel() for weight in linear),
        perturbs=rule.perturbs,
        pulls=rule.pulls and config.amplify != "optimizer",
        whole=whole or rule.needs_hessian,
    )


def _whole(described: Any, arguments: RunArguments, config: ROSUConfig) -> Any:
    """The model as it is trained, with its adapter."""
    from transformers import AutoModelForCausalLM

    model, adapter = _built(AutoModelForCausalLM, described, arguments), lora_config(arguments)
    if config.trainable_parameters is not None:
        train_only(model, config.trainable_parameters)
    return model if adapter is None else add_adapter(model, adapter, config.seed)


def _lower_layers(described: Any, arguments: RunArguments, config: RepresentationConfig) -> tuple[Any, int]:
    """The layers that are loaded, and the size of the whole model, which is saved."""
    from transformers import AutoModel, AutoModelForCausalLM

    check_target(config.target_layer, int(text_config(described).num_hidden_layers))
    model = _built(AutoModel, shortened(described, config.target_layer + 1), arguments)
    named = dict(model.named_parameters())
    stack = layer_stack(model, config.layer_stack)
    trained = (
        names_below(model, stack, config.target_layer)
        if config.trainable_parameters is None
        else trainable_names(named, config.trainable_parameters, stack, config.target_layer)
    )
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

    try:
        made, options = Trainer.get_optimizer_cls_and_kwargs(config)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"optim={str(getattr(config.optim, 'value', config.optim))!r}: {one_line(error)}") from error
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
