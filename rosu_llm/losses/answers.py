"""The output layer where a label is, and nowhere else.

A causal model computes logits for every position: length × vocabulary numbers, the largest tensor of a pass, though a
third of the positions predict an answer token. Here only those positions reach the output layer, in chunks; each chunk
of logits is reduced to a few numbers per position at once, and computed again in the backward pass (unless it is the
only one), so that no more than a chunk is ever kept. The numbers are those of the whole logits to rounding.

The model's own forward runs, with its output layer's forward replaced while it does (and those of its feed-forward
blocks: :mod:`rosu_llm.losses.thinning`). So wrappers that gather weights or
average gradients (DDP, FSDP2, ZeRO, PEFT) see what they always see. What a model does with its logits afterwards is
found out at its first call: nothing, then it is handed the reduced numbers in their place; something (soft-capping, a
scale), then it gets the logits of the answer positions in one piece. Models whose output layer cannot be found, and
those compiled as a whole, compute all logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .joining import check_kept_apart, joined, places
from .thinning import feed_forwards, replaced_forward, thinned

logger = logging.getLogger(__name__)

#: Logits computed at once. 128 MB of float32 keep a GPU busy. A CPU reduces them faster while they fit its cache, but
#: every chunk reads and writes the weight's whole gradient, so that with gradients they had better be few.
CHUNK = {"cpu": 1 << 20}
CHUNK_WITH_GRADIENT = {"cpu": 1 << 22}
DEFAULT_CHUNK = 1 << 25

#: Numbers per position, shape [positions] or [positions, numbers], from their logits (at least float32); the slice
#: tells which of all positions they are. What else it reads must need no gradient.
Reduction = Callable[[Tensor, slice], Tensor]


class TokenNLL:
    """−log p of given tokens: the reduction nearly every loss is made of, with its gradient in one go.

    Autograd would write three tensors of the size of the logits for it.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def __call__(self, logits: Tensor, at: slice) -> Tensor:
        return functional.cross_entropy(logits, self._tokens[at], reduction="none")

    def slope(self, logits: Tensor, at: slice, gradient: Tensor) -> Tensor:
        """The gradient with respect to the logits, in their place: (p − 1[token]) times that of the numbers."""
        found = wide(logits)
        torch.softmax(found, -1, out=found)
        found[torch.arange(len(found), device=found.device), self._tokens[at]] -= 1.0
        return found.mul_(gradient).to(logits.dtype)


#: How the output layer of a model can be used: "reduced", "positions" or "whole"; found out before the first call.
_WAYS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
#: Whether its feed-forward blocks can be left to the tokens that count.
_THIN: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def unwrapped(model: Any) -> Any:
    """The model inside DDP, DeepSpeed's engine, torch.compile and PEFT, whose own forward takes anything."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif type(model).__name__ in ("DistributedDataParallel", "DeepSpeedEngine"):
            model = model.module
        else:
            return model


def at_positions(
    model: nn.Module,
    inputs: Mapping[str, Any],
    rows: Tensor,
    columns: Tensor,
    reduce: Reduction,
    present: Tensor | None = None,
    join: bool = False,
) -> Tensor:
    """``reduce`` of the logits at the given positions, in their order; shape [positions, numbers].

    Args:
        inputs: the model's arguments; ``input_ids`` among them.
        rows, columns: the positions, on the model's device.
        present: flat positions of what is no padding; None where that is not known.
        join: hand the model those in one row.
    """
    inner, every, shape = unwrapped(model), slice(0, len(rows)), inputs["input_ids"].shape
    if join and present is not None:
        check_kept_apart(model, inner, inputs, present)
        columns = places(present, rows * shape[1] + columns, shape.numel())
        inputs, rows, present = joined(inner, inputs, present), torch.zeros_like(rows), None
        shape = inputs["input_ids"].shape
    layer = _output_layer(model, inner)
    if inner not in _WAYS:
        _WAYS[inner] = "whole" if layer is None else _tried(model, inner, layer, inputs)
        if _WAYS[inner] == "whole":
            name = type(inner).__name__
            logger.info("%s computes the logits of all positions: its output layer cannot be replaced.", name)
    if layer is None or _WAYS[inner] == "whole":
        return _columns(reduce(wide(model(**inputs).logits[rows, columns]), every))
    head = _Head(layer, shape, rows, columns)
    blocks = feed_forwards(inner) if _THIN[inner] else []
    if any(_watched(block) for block in blocks):
        blocks = []
    with (
        head.replaced(None if _WAYS[inner] == "positions" or _watched(layer) else reduce),
        thinned(blocks, shape, present, head.flat),
    ):
        found: Tensor = model(**inputs).logits
    if not head.followed:
        raise RuntimeError(f"{type(inner).__name__} called its output layer in another way than before.")
    return found.squeeze(0) if head.made is None else _columns(reduce(wide(found.squeeze(0)), every))


@torch.no_grad()
def _tried(model: nn.Module, inner: Any, layer: nn.Module, inputs: Mapping[str, Any]) -> str:
    """What the model does with its logits, found out on its first row, without dropout.

    A run that is resumed tries again: nothing of a training pass may depend on whether it is the first.
    """
    count = len(inputs["input_ids"])
    first = {k: v[:1] if isinstance(v, Tensor) and v.dim() and len(v) == count else v for k, v in inputs.items()}
    columns = torch.arange(first["input_ids"].shape[1], device=inputs["input_ids"].device)
    head = _Head(layer, first["input_ids"].shape, torch.zeros_like(columns), columns)
    with _evaluating(model), head.replaced(None):
        found: Tensor = model(**first).logits
    if not head.followed or found.shape[:2] != first["input_ids"].shape or head.made is None:
        return "whole"
    with _evaluating(model):
        _THIN[inner] = _same_when_thinned(model, feed_forwards(inner), layer, first, columns, head.made)
    unchanged = found.shape == head.made.shape and bool(((found == head.made) | (found != found)).all())
    return "reduced" if unchanged and bool(found.any()) else "positions"  # zeros tell nothing


def _same_when_thinned(
    model: nn.Module,
    blocks: list[nn.Module],
    layer: nn.Module,
    row: Mapping[str, Any],
    columns: Tensor,
    logits: Tensor,
) -> bool:
    """Whether every other position of the first three quarters of a row keeps its logits without the rest."""
    shape, present = row["input_ids"].shape, columns[: max(1, 3 * len(columns) // 4)]
    asked = present[::2]
    head = _Head(layer, shape, torch.zeros_like(asked), asked)
    if not blocks:
        return False
    try:
        with head.replaced(None), thinned(blocks, shape, present, asked):
            model(**row)
    except (TypeError, AttributeError, RuntimeError, IndexError):  # a block that is not what it is called
        return False
    if head.made is None:
        return False
    size, rounding = float(logits.abs().max()), torch.finfo(logits.dtype).eps ** 0.5
    return size > 0.0 and float((head.made - logits[:, asked]).abs().max()) <= rounding * size


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def wide(logits: Tensor) -> Tensor:
    """In at least float32."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _columns(values: Tensor) -> Tensor:
    return values if values.dim() > 1 else values.unsqueeze(1)


def _output_layer(model: Any, inner: Any) -> nn.Module | None:
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    return head if isinstance(head, nn.Module) and not compiled(model) else None


def _watched(layer: nn.Module) -> bool:
    """Whether somebody's hook reads or changes the logits; those that gather and free weights do not."""
    hooks = layer._forward_hooks.values()
    return any(not getattr(hook, "__module__", "").startswith(("torch.distributed", "deepspeed")) for hook in hooks)


def compiled(model: Any) -> bool:
    """Whether a graph was made of the whole forward, in which the output layer cannot be replaced."""
    while model is not None:
        if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
            return True
        model = model.module if isinstance(getattr(model, "module", None), nn.Module) else None
    return False


class _Head:
    """A model's output layer during one forward; ``made`` are its logits, where they were not reduced."""

    def __init__(self, module: nn.Module, shape: torch.Size, rows: Tensor, columns: Tensor) -> None:
        self._module: Any = module
        self._shape, self._rows, self._columns = shape, rows, columns
        self._forward = module.forward
        self._calls: list[bool] = []
        self.made: Tensor | None = None

    @property
    def followed(self) -> bool:
        """Whether it was called once, with all hidden states."""
        return self._calls == [True]

    @property
    def flat(self) -> Tensor:
        """Its positions, counted through all rows."""
        return self._rows * self._shape[1] + self._columns

    def replaced(self, reduce: Reduction | None) -> AbstractContextManager[None]:
        """Inside, the layer sees the positions alone and returns their numbers or, without ``reduce``, their logits."""
        return replaced_forward(self._module, partial(self._call, reduce))

    def _call(self, reduce: Reduction | None, *given: Any, **named: Any) -> Tensor:
        expected = len(given) == 1 and not named and given[0].shape[:2] == self._shape
        self._calls.append(expected)
        if not expected:
            result: Tensor = self._forward(*given, **named)
            return result
        chosen = given[0][self._rows, self._columns]
        if reduce is not None:
            return self._reduced(chosen, reduce).unsqueeze(0)
        self.made = self._forward(chosen.unsqueeze(0))
        return self.made

    def _slices(self, hidden: Tensor) -> list[slice]:
        chunk = CHUNK_WITH_GRADIENT if torch.is_grad_enabled() else CHUNK
        return _slices(len(hidden), max(1, chunk.get(hidden.device.type, DEFAULT_CHUNK) // len(self._module.weight)))

    def _reduced(self, hidden: Tensor, reduce: Reduction) -> Tensor:
        module, kind = self._module, hidden.device.type
        if getattr(self._forward, "__func__", None) is nn.Linear.forward:
            if torch.is_autocast_enabled(kind):
                hidden = hidden.to(torch.get_autocast_dtype(kind))
            result: Tensor = _LinearValues.apply(hidden, module.weight, module.bias, reduce, self._slices(hidden))
            return result

        def one(part: Tensor, at: slice) -> Tensor:  # adapters on it, quantised weights
            return _columns(reduce(wide(self._forward(part)), at))

        run = partial(checkpoint, one, use_reentrant=False) if torch.is_grad_enabled() else one
        return torch.cat([run(hidden[at], at) for at in self._slices(hidden)])


class _LinearValues(torch.autograd.Function):
    """``reduce(hidden · weightᵀ + bias)``, chunk by chunk, in both directions.

    The weight's gradient is summed in place: chunks under autograd would write a whole one each.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, reduce: Reduction, slices: list[slice]
    ) -> Tensor:
        ctx.reduce, ctx.slices = reduce, slices
        layer, found, logits = _cast(hidden, weight, bias), [], None
        for at in slices:
            logits = functional.linear(hidden[at], *layer)
            found.append(_columns(reduce(wide(logits), at)))
        # A single chunk may stay: the backward pass comes next and would compute it at once. It uses it up.
        ctx.kept = logits if len(slices) == 1 else None
        ctx.save_for_backward(hidden, weight, bias)
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None
        asked = ctx.needs_input_grad[:3]
        layer = _cast(hidden, weight, bias)
        if torch.is_grad_enabled():  # to be differentiated once more: as autograd has it
            values = _columns(ctx.reduce(wide(functional.linear(hidden, *layer)), slice(0, len(hidden))))
            sources = [t for t, needed in zip((hidden, weight, bias), asked, strict=True) if needed]
            found = iter(torch.autograd.grad(values, sources, gradient, create_graph=True))
            return (*(next(found) if needed else None for needed in asked), None, None)
        to_hidden = torch.empty_like(hidden) if asked[0] else None
        to_weight = _zeros(weight) if asked[1] else None
        to_bias = _zeros(bias) if asked[2] and bias is not None else None
        for at in ctx.slices:
            logits = functional.linear(hidden[at], *layer) if kept is None else kept
            slope = _slope(ctx.reduce, logits, at, gradient[at])
            if to_hidden is not None:
                torch.mm(slope, layer[0], out=to_hidden[at])
            if to_weight is not None and to_weight.dtype == slope.dtype:
                to_weight.addmm_(slope.t(), hidden[at])
            elif to_weight is not None:
                to_weight += slope.t() @ hidden[at]
            if to_bias is not None:
                to_bias += slope.sum(0)
        return (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            None,
            None,
        )


def _slope(reduce: Reduction, logits: Tensor, at: slice, gradient: Tensor) -> Tensor:
    """The gradient with respect to a chunk of logits."""
    if isinstance(reduce, TokenNLL):
        return reduce.slope(logits, at, gradient)
    logits = logits.detach().requires_grad_()
    with torch.enable_grad():
        values = _columns(reduce(wide(logits), at))
    (slope,) = torch.autograd.grad(values, logits, gradient)
    return slope


def _cast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The layer in the type of the hidden states, which autocast may have lowered."""
    return weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)


def _zeros(tensor: Tensor) -> Tensor:
    """To sum chunks in: not in bf16, which would round every one of them away a little."""
    return torch.zeros_like(tensor, dtype=tensor.dtype if tensor.dtype == torch.float64 else torch.float32)


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]
