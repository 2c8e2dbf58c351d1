"""An adapter on a model: PEFT's, seeded, and refused where it does not fit."""

from __future__ import annotations

from typing import Any

from transformers import set_seed

from ..errors import ConfigError, one_line


def add_adapter(model: Any, peft_config: Any, seed: int) -> Any:
    """The model with the adapter, which is drawn at random from ``seed``."""
    try:
        from peft import get_peft_model
    except ImportError as error:
        raise ConfigError("peft_config was given but peft is not installed: pip install 'rosu-llm[peft]'.") from error
    refuse_prompt_learning(peft_config)
    set_seed(seed)
    try:
        adapted = get_peft_model(model, peft_config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # no layer of that name, for one
        raise ConfigError(
            f"The adapter does not fit: {one_line(error)} lora_target_modules='all-linear' fits any model."
        ) from error
    _check_targets(adapted, getattr(peft_config, "target_modules", None))
    return adapted


def let_gradients_through(model: Any) -> None:
    """Let gradients reach an adapter inside layers that are checkpointed.

    Reentrant checkpointing gives a layer no gradient unless one of its inputs wants some. Behind a frozen embedding
    none does: the adapter gets no gradient, which goes unnoticed where something after the layers is trained.
    transformers 5 sees to it itself, earlier ones do not.
    """
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    frozen = embedding is not None and not any(p.requires_grad for p in embedding.parameters())
    if frozen and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()


def refused_adapter(method: str) -> ConfigError:
    """The error for an adapter where weights are only made smaller."""
    return ConfigError(
        f"method={method!r} makes weights smaller that the forget data depends on, and those of a new adapter are zero "
        "(B) or without effect (A): nothing would change. Leave lora_r or peft_config out."
    )


def refuse_prompt_learning(peft_config: Any) -> None:
    """Raise for adapters that put virtual tokens before the text: logits and labels would no longer face each other."""
    if getattr(peft_config, "is_prompt_learning", False):
        raise ConfigError(
            f"{type(peft_config).__name__} puts virtual tokens before the text, so that labels do not fit its logits: "
            "use an adapter of the layers, such as LoraConfig."
        )


def _check_targets(adapted: Any, wanted: Any) -> None:
    """Raise for a name of ``target_modules`` that fits no layer; PEFT minds only when none fits."""
    found: set[str] = set(getattr(adapted, "targeted_module_names", None) or ())
    if not isinstance(wanted, (list, set, tuple)) or not found:
        return
    missing = sorted(name for name in wanted if not any(f == name or f.endswith(f".{name}") for f in found))
    if missing:
        there = ", ".join(sorted({f.rsplit(".", 1)[-1] for f in found}))
        raise ConfigError(
            f"The adapter does not fit: no layer is called {', '.join(missing)}. Layers that got one: {there}. "
            "lora_target_modules='all-linear' fits any model."
        )
