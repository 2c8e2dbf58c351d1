"""Activations h at layer ℓ, for the weights as they are and for the initial ones.

`FastActivations` runs the frozen layers once per batch: a pass with the initial θ₀ records what each trained
layer is called with, and gives the reference h₀. From the first trained layer's input, h(θ) is a run of the few
layers up to ℓ. There is no second model: θ₀ is a handful of matrices. `PlainActivations` does the same with full
forward passes and a frozen copy of the model; it is the numerical truth for the fast one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..losses.language import MODEL_INPUTS
from .memo import FirstLayer, Memo


@dataclass(frozen=True)
class BatchActivations:
    """What is computed once per batch.

    Attributes:
        reference: h₀, the activations under the initial weights.
        hidden: input of the first trained layer (fast), or nothing.
        calls: further arguments of each layer from there on (fast).
        memo: what the first of them need not compute again (fast).
        inputs: the model's inputs (plain).
    """

    reference: Tensor
    hidden: Tensor | None = None
    calls: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = ()
    memo: Memo | None = None
    inputs: Mapping[str, Any] | None = None


class Activations(Protocol):
    """h and h₀ at one layer."""

    def prepare(self, batch: Mapping[str, Any]) -> BatchActivations:
        """The reference activations, and whatever makes :meth:`current` cheap."""

    def current(self, prepared: BatchActivations) -> Tensor:
        """The activations under the weights as they are now; differentiable in the trained ones."""


class _Reached(Exception):
    """Layer ℓ has been computed; nothing above it is needed."""


class FastActivations:
    """Activations of layer ``last`` through a suffix that starts at layer ``first``.

    Args:
        model: the whole model or its lower part.
        layers: its decoder layers.
        first, last: the first trained layer, and ℓ.
        initial: θ₀ by parameter name; its tensors follow the batches to their device.
    """

    def __init__(
        self, model: nn.Module, layers: nn.ModuleList, first: int, last: int, initial: dict[str, Tensor]
    ) -> None:
        self._model, self._initial = model, initial
        self._suffix = list(layers)[first : last + 1]
        owners = {model.get_submodule(name.rpartition(".")[0]) for name in initial}
        layer = self._suffix[0]
        trained = [module for module in layer.modules() if module in owners]
        self._first = FirstLayer(layer, trained[0]) if len(trained) == 1 and trained[0] is not layer else None

    @torch.no_grad()
    def prepare(self, batch: Mapping[str, Any]) -> BatchActivations:
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, rest, named = _split(args, kwargs)
            if not inputs:
                inputs.append(hidden)
            calls.append((rest, named))

        def stop(_: nn.Module, __: Any, output: Any) -> None:
            outputs.append(_tensor(output))
            raise _Reached

        for name, tensor in self._initial.items():
            self._initial[name] = tensor.to(batch["input_ids"].device)
        hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in self._suffix]
        hooks.append(self._suffix[-1].register_forward_hook(stop))
        recording = nullcontext() if self._first is None else self._first.recording()
        try:
            with recording as memo:
                functional_call(self._model, self._initial, (), _inputs(batch))
        except _Reached:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return BatchActivations(outputs[0], inputs[0], tuple(calls), memo)

    def current(self, prepared: BatchActivations) -> Tensor:
        assert prepared.hidden is not None
        hidden, memo = prepared.hidden, prepared.memo
        for layer, (args, kwargs) in zip(self._suffix, prepared.calls, strict=True):
            replaying = nullcontext() if memo is None or self._first is None else self._first.replaying(memo)
            with replaying:
                hidden = _tensor(layer(hidden, *args, **kwargs))
            memo = None  # of the first layer alone
        return hidden


class PlainActivations:
    """The same by full forward passes and a frozen copy of the model as it is now."""

    def __init__(self, model: nn.Module, stack: str, last: int) -> None:
        self._model, self._where = model, f"{stack}.{last}"
        self._reference = copy.deepcopy(model).eval().requires_grad_(False)

    @property
    def extra_bytes(self) -> int:
        """Memory of the copy."""
        return sum(p.numel() * p.element_size() for p in self._reference.parameters())

    def prepare(self, batch: Mapping[str, Any]) -> BatchActivations:
        inputs = _inputs(batch)
        device = inputs["input_ids"].device
        if next(self._reference.parameters()).device != device:
            self._reference.to(device)
        with torch.no_grad():
            return BatchActivations(self._run(self._reference, inputs), inputs=inputs)

    def current(self, prepared: BatchActivations) -> Tensor:
        assert prepared.inputs is not None
        return self._run(self._model, prepared.inputs)

    def _run(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        seen: list[Tensor] = []
        layer = model.get_submodule(self._where)
        hook = layer.register_forward_hook(lambda _, __, output: seen.append(_tensor(output)))
        try:
            model(**inputs)
        finally:
            hook.remove()
        return seen[0]


def attach_casts(model: nn.Module, names: list[str]) -> list[Any]:
    """Let the modules that own the named parameters compute in float32; returns hooks.

    Without autocast the types of activations and weights would clash there, and so would those of a trained weight
    and the frozen bias beside it.
    """

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        weight = next(module.parameters(recurse=False))
        if not args or not args[0].is_floating_point():  # an embedding's token numbers
            return None
        if torch.is_autocast_enabled(weight.device.type) or args[0].dtype == weight.dtype:
            return None
        module._rosu_dtype = args[0].dtype  # type: ignore[assignment]
        return (args[0].to(weight.dtype), *args[1:])

    def leave(module: nn.Module, _: Any, output: Any) -> Any:
        dtype = module.__dict__.pop("_rosu_dtype", None)
        return output if dtype is None else output.to(dtype)

    hooks: list[Any] = []
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = model.get_submodule(owner)
        for p in module.parameters(recurse=False):
            p.data = p.data.float()
        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    return hooks


def _inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {**{k: batch[k] for k in MODEL_INPUTS if k in batch}, "use_cache": False}


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """The hidden states of a layer's call, and everything else."""
    if args:
        return args[0], args[1:], dict(kwargs)
    rest = dict(kwargs)
    return rest.pop("hidden_states"), (), rest


def _tensor(output: Any) -> Tensor:
    """Layers return the hidden states, or in older versions a tuple that begins with them."""
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result
