"""Which module is the stack of decoder layers, and which parameters of it are trained, by name.

Architectures differ in what they call things; a wrong guess would train nothing or the wrong matrix. So a
name is either found unambiguously or refused with the nearest ones that exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..training.chosen import compile_pattern, nearest


def text_config(config: Any) -> Any:
    """The part of a model's configuration that describes its decoder."""
    inner = getattr(config, "get_text_config", None)
    return inner() if callable(inner) else config


def layer_stack(model: Any, name: str | None = None) -> str:
    """Name of the module list that holds the decoder layers.

    Without ``name`` it is the only module list with ``num_hidden_layers`` entries; ``name`` is a regular
    expression that must match the end of exactly one module list's name.
    """
    modules = model.named_modules()
    lists: dict[str, nn.ModuleList] = {n: m for n, m in modules if isinstance(m, nn.ModuleList) and len(m)}
    if name is not None:
        expression = compile_pattern("layer_stack", name)
        found = [n for n in lists if re.search(f"(?:{expression.pattern})$", n)]
    else:
        count = getattr(text_config(model.config), "num_hidden_layers", None)
        found = [n for n, m in lists.items() if len(m) == count]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(f"{n} ({len(m)})" for n, m in lists.items()) or "none at all"
    why = "fits none" if not found else f"fits {', '.join(found)}"
    asked = f"layer_stack={name!r}" if name is not None else "The model's number of layers"
    raise ConfigError(f"{asked} {why} of its module lists: {shown}. Set layer_stack to the name of the decoder's.")


def layer_index(name: str, stack: str) -> int | None:
    """The layer a parameter belongs to; None outside the stack."""
    match = re.search(rf"(?:^|\.){re.escape(stack)}\.(\d+)\.", name)
    return None if match is None else int(match[1])


def trainable_names(names: Iterable[str], pattern: str, stack: str, target_layer: int) -> list[str]:
    """Names of the parameters that ``pattern`` selects (``re.search``), each in a layer up to ``target_layer``."""
    expression = compile_pattern("trainable_parameters", pattern)
    known = list(names)
    chosen = [n for n in known if expression.search(n)]
    inside = [n for n in known if layer_index(n, stack) is not None]
    if not chosen:
        raise ConfigError(
            f"trainable_parameters={pattern!r} matches no parameter. The nearest are {nearest(pattern, inside)}."
        )
    outside = [n for n in chosen if layer_index(n, stack) is None]
    if outside:
        raise ConfigError(
            f"trainable_parameters={pattern!r} also matches {', '.join(outside[:3])}, outside the decoder layers: "
            rf"make it narrower, e.g. layers\.(5|6|7)\.mlp\.down_proj\.weight."
        )
    above = sorted({i for n in chosen if (i := layer_index(n, stack)) is not None and i > target_layer})
    if above:
        raise ConfigError(
            f"trainable_parameters={pattern!r} matches parameters of layer {', '.join(map(str, above))}, above "
            f"target_layer={target_layer}: they would get no gradient. Raise target_layer or leave them out."
        )
    return chosen


def names_below(model: Any, stack: str, target_layer: int) -> list[str]:
    """All parameters that the activations of ``target_layer`` depend on: its layers, those below, the embedding."""
    embedding = {id(p) for p in model.get_input_embeddings().parameters()}
    return [
        name
        for name, p in model.named_parameters()
        if id(p) in embedding or ((i := layer_index(name, stack)) is not None and i <= target_layer)
    ]


def check_target(target_layer: int, layers: int) -> None:
    """ℓ must be a layer of the model."""
    if not 0 <= target_layer < layers:
        raise ConfigError(
            f"target_layer={target_layer} is not a layer of this model, which has {layers}: give 0 to {layers - 1}."
        )
