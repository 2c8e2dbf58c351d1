"""The metric an adaptive optimizer works in: D = √v̂ + ε, from its second moments as they are before the step.

Adam moves the weights by −η D⁻¹ m̂. D⁻¹ is formed block by block where it is needed, in the type that is computed in
there, and never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError


@dataclass(frozen=True)
class Preconditioner:
    """D of one parameter.

    Attributes:
        second: the running mean of squared gradients.
        correction: 1 − β₂ᵗ.
        eps: ε.
    """

    second: Tensor
    correction: float
    eps: float

    def inverse(self, second: Tensor, dtype: torch.dtype) -> Tensor:
        """D⁻¹ of one block of ``second``; 0 where the optimizer has met no gradient yet.

        There D = ε = 10⁻⁸ would let a few embedding rows of new tokens make up all of δ. Adam itself would not: it
        updates v̂ before it divides.
        """
        wide = second.to(dtype)
        return (wide / self.correction).sqrt_().add_(self.eps).reciprocal_().masked_fill_(wide == 0.0, 0.0)


#: One entry per parameter; None where the optimizer has not met the parameter yet.
Preconditioners = list[Preconditioner | None]


def check_adaptive(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers whose second moments cannot be read."""
    own = type(optimizer).__module__.split(".")[0] in ("bitsandbytes", "torchao")  # quantised, or by other names
    for group in optimizer.param_groups:
        if own or "betas" not in group or "eps" not in group or type(optimizer).__name__.lower().endswith("8bit"):
            raise _unreadable(optimizer)


def _unreadable(optimizer: torch.optim.Optimizer) -> ConfigError:
    kind = type(optimizer)
    return ConfigError(
        f"metric='adam' needs the second moments of Adam, which {kind.__module__.split('.')[0]}'s {kind.__name__} does "
        "not keep (in full precision): use optim='adamw_torch', or metric='euclidean'."
    )


def second_moment(group: dict[str, Any]) -> str:
    """The name under which the optimizer keeps what it divides by."""
    return "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"


def preconditioners_of(optimizer: torch.optim.Optimizer, parameters: list[Any]) -> Preconditioners | None:
    """D of the given parameters, from the optimizer's state; None before its first step."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    first = optimizer.param_groups[0]  # DeepSpeed's stage 3 takes parameters out of their groups between steps
    known = [(p, groups.get(id(p), first), optimizer.state[p]) for p in parameters if optimizer.state.get(p)]
    if not known:
        return None
    if any(second_moment(group) not in state for _, group, state in known):
        raise _unreadable(optimizer)
    # fused kernels count per group
    counts = steps_taken([state["step"] if "step" in state else group["step"] for _, group, state in known])
    found: dict[int, Preconditioner] = {}
    for (p, group, state), count in zip(known, counts, strict=True):
        second = state[second_moment(group)]
        local = second.to_local() if hasattr(second, "to_local") else second
        found[id(p)] = Preconditioner(local, 1.0 - group["betas"][1] ** count, group["eps"])
    return [found.get(id(p)) for p in parameters]


def steps_taken(counts: Sequence[Any]) -> list[float]:
    """How many steps: numbers, or tensors, which fused kernels keep on the device. Those are read all at once."""
    local = [count.to_local() if hasattr(count, "to_local") else count for count in counts]
    read = {id(count): float(count) for count in local if not isinstance(count, Tensor)}
    for device in {count.device for count in local if isinstance(count, Tensor)}:
        own = [count for count in local if isinstance(count, Tensor) and count.device == device]
        read.update(zip(map(id, own), torch.stack([count.reshape(()) for count in own]).tolist(), strict=True))
    return [read[id(count)] for count in local]
