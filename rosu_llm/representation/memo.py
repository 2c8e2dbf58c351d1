"""What the first trained layer computes before the trained matrix, remembered instead of computed again.

Everything that runs before the first trained matrix is the same for θ₀, θ and θ+δ: in a Llama layer whose
``down_proj`` is trained, attention and most of the MLP. They are recorded in the reference pass and replayed in the
others. Nothing is assumed about the architecture: a child of the layer is replayed if it ran once, and finished before
the trained module began; the child that contains the trained module is cut short if its output *is* that module's.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass
class Memo:
    """One batch's recording.

    Attributes:
        outputs: of the children that ran before the trained module.
        inputs: what the trained module was called with.
        ends: the child that ends in the trained module, where one does.
    """

    outputs: dict[nn.Module, Any] = field(default_factory=dict)
    inputs: tuple[Any, ...] | None = None
    ends: nn.Module | None = None


class FirstLayer:
    """Records and replays a layer in which ``trained`` is the only module with trained parameters."""

    def __init__(self, layer: nn.Module, trained: nn.Module) -> None:
        self._children = [child for child in layer.children() if child is not trained]
        self._trained = trained

    @contextlib.contextmanager
    def recording(self) -> Iterator[Memo]:
        """Hooks that fill a memo while the layer runs once."""
        memo = Memo()
        result: list[Any] = []
        calls: Counter[nn.Module] = Counter()

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not kwargs:  # else it is called in a way that cannot be repeated from its inputs alone
                memo.inputs = args

        def finish(module: nn.Module, _: Any, output: Any) -> None:
            calls[module] += 1
            if module is self._trained:
                result.append(output)
            elif not started():
                memo.outputs[module] = output
            elif result and output is result[0] and memo.inputs is not None:
                memo.ends = module

        def started() -> bool:
            return memo.inputs is not None or bool(result)

        hooks = [self._trained.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)]
        hooks += [module.register_forward_hook(finish) for module in (*self._children, self._trained)]
        try:
            yield memo
        finally:
            for hook in hooks:
                hook.remove()
            for module in [m for m, times in calls.items() if times > 1]:  # Phi drops out twice with one module
                memo.outputs.pop(module, None)
                memo.ends = None if module in (self._trained, memo.ends) else memo.ends

    @contextlib.contextmanager
    def replaying(self, memo: Memo) -> Iterator[None]:
        """The layer computes only what depends on the trained parameters."""
        replaced: dict[nn.Module, Any] = {module: _constant(output) for module, output in memo.outputs.items()}
        if memo.ends is not None:
            replaced[memo.ends] = lambda *_, **__: self._trained(*(memo.inputs or ()))
        before = {module: module.__dict__.get("forward") for module in replaced}
        try:
            for module, forward in replaced.items():
                module.__dict__["forward"] = forward
            yield
        finally:
            for module, forward in before.items():
                if forward is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = forward


def _constant(output: Any) -> Any:
    return lambda *_, **__: output
