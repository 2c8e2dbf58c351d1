"""What a trainer was handed and cannot serve is refused by name, before anything is computed.

Everything here would otherwise pass without a word: an argument that Trainer knows and this step never asks, a model
that is no causal language model, an optimizer that steps inside the passes.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..errors import ConfigError, UnsupportedLayoutError
from .adapter import refuse_prompt_learning
from .config import MethodArguments
from .window import PARTS

#: Attention that can be differentiated twice (sdpa by its plain kernel).
_TWICE = ("eager", "sdpa")

logger = logging.getLogger(__name__)


def check_handed_over(kwargs: Mapping[str, Any], *, persistent: bool) -> None:
    """Raise for arguments of ``Trainer`` that the step would never ask."""
    if kwargs.get("compute_loss_func") is not None:
        raise ConfigError(
            "compute_loss_func would never be called: the losses are forget_loss and retain_loss. Register yours with "
            "register_loss and name it there."
        )
    dataset = kwargs.get("train_dataset")
    own = getattr(dataset, "shares_epoch", False) or type(dataset).__module__.startswith("datasets.")
    if persistent and hasattr(dataset, "set_epoch") and not own:
        raise ConfigError(
            f"dataloader_persistent_workers=True keeps copies of {type(dataset).__name__} that set_epoch does not "
            "reach: every epoch would be the first one. Leave it out."
        )
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        if kwargs.get(name) is not None and any(True for _ in paired_sets(kwargs.get("eval_dataset"))):
            raise ConfigError(
                f"{name} would never be called: of pairs only eval_loss and eval_forget_loss are computed. Leave it "
                "out, or give plain samples as eval_dataset."
            )


def check_which_weights(args: Any, settings: MethodArguments) -> None:
    """Raise if two settings would decide with which weights the run ends."""
    for name, off in (("budget", None), ("keep_best", "off")):
        if args.load_best_model_at_end and (value := getattr(settings, name)) != off:
            raise ConfigError(
                f"load_best_model_at_end=True ends with the checkpoint that evaluates best, and {name}={value!r} "
                "chooses the last weights itself: leave one of them out."
            )


def tell_what_is_idle(settings: MethodArguments) -> None:
    """Name settings that were given and do nothing, because another one is as it is."""
    needs = {
        ("forget_level", "forget_margin", "forget_draw"): ("forget_until", settings.forget_until == "off"),
        ("budget_tries",): ("budget", settings.budget is None),
        ("budget_every",): ("budget", settings.budget is None and settings.keep_best == "off"),
        ("rho_share",): ("rho", settings.rho != "auto"),
    }
    usual = {f.name: f.default for f in fields(MethodArguments)}
    for names, (other, idle) in needs.items():
        for name in names:
            if idle and (value := getattr(settings, name)) != usual[name]:
                logger.warning("%s=%r has no effect with %s=%r.", name, value, other, getattr(settings, other))


def is_indexable(samples: Any) -> bool:
    """Whether there are samples that can be counted and read by number."""
    return hasattr(samples, "__getitem__") and hasattr(samples, "__len__") and len(samples) > 0


def paired_sets(dataset: Any) -> Iterator[Any]:
    """Those evaluation sets, of one or several by name, whose items are pairs and can be read by index."""
    for each in dataset.values() if isinstance(dataset, dict) else [dataset]:
        if is_indexable(each):
            first = each[0]
            if isinstance(first, Mapping) and any(part in first for part in PARTS):
                yield each


def check_model(model: Any) -> None:
    """Raise for models that do not predict the next token from those before it, or whose loss has parts of its own."""
    refuse_prompt_learning(getattr(model, "active_peft_config", None))
    config, kind = getattr(model, "config", None), type(model).__name__
    if config is None or not hasattr(config, "is_encoder_decoder"):
        return  # no model of transformers: nothing is known about it
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    family = getattr(config, "model_type", "")
    bidirectional = family in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not (
        getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    )
    if config.is_encoder_decoder or bidirectional:
        why = "an encoder and decoder" if config.is_encoder_decoder else "a model that sees the tokens after, too"
        raise ConfigError(
            f"{kind} is {why}, not a causal language model: it would be trained on labels shifted by one, which are "
            "not its own. Use a decoder (AutoModelForCausalLM; of a bidirectional family with is_decoder=True)."
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "output_router_logits", False):
        raise ConfigError(
            f"{kind} has output_router_logits=True, but its routers' auxiliary loss is part of neither forget_loss nor "
            "retain_loss and would be left out: set model.config.output_router_logits=False, or register a loss that "
            "adds it."
        )


def check_optimizer(optimizer: Any) -> None:
    """Raise for optimizers that step inside each backward pass; a window has several before its one step."""
    name = type(optimizer).__name__
    if re.search("lomo|layerwise", name, re.IGNORECASE):
        raise ConfigError(
            f"{name} steps inside every backward pass, so that no pass would see the same weights: use "
            "another optimizer, such as optim='adamw_torch'."
        )


def check_second_derivatives(settings: MethodArguments, args: Any, model: Any, layout: str) -> None:
    """Raise where Hessian-vector products are needed and cannot be had."""
    if not settings.rule().needs_hessian:
        return
    asked = f"jacobian={settings.jacobian!r} differentiates twice"
    if layout not in ("local", "ddp"):
        raise UnsupportedLayoutError(
            f"{asked} through whole parameters, which {layout} takes apart: use one device or DDP, or "
            "jacobian='relaxed'."
        )
    for name in ("torch_compile", "use_liger_kernel"):
        if getattr(args, name, False):
            raise UnsupportedLayoutError(f"{asked}, which {name} cannot: leave it out, or use jacobian='relaxed'.")
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention is not None and attention not in _TWICE:
        raise UnsupportedLayoutError(
            f"{asked}, and attn_implementation={attention!r} has no second derivative: use 'eager' or 'sdpa', or "
            "jacobian='relaxed'."
        )


def check_room(folder: Path, model: Any) -> None:
    """Raise if the disk has no room for the model at the end; an adapter is saved alone."""
    parameters = [p for p in model.parameters() if p.requires_grad or not hasattr(model, "peft_config")]
    size = sum(p.numel() * p.element_size() for p in parameters)
    free = shutil.disk_usage(next(p for p in (folder, *folder.absolute().parents) if p.exists())).free
    if free < size:
        raise ConfigError(
            f"output_dir={str(folder)!r} has {free / 2**30:.1f} GiB free, and the model takes {size / 2**30:.1f} GiB: "
            "free some space, or give another --output-dir."
        )


def check_host_memory(needed: int) -> None:
    """Raise if the host has no room for what ``capture_device='cpu'`` keeps there for all of its processes."""
    import psutil

    free = int(psutil.virtual_memory().available)
    if needed > free:
        raise ConfigError(
            f"capture_device='cpu' keeps {needed / 2**30:.1f} GiB of captured gradients and backup on this host, which "
            f"has {free / 2**30:.1f} GiB free: leave it out, halve the gradients with capture_dtype='bfloat16', or "
            "train on more hosts."
        )
