"""The metric an adaptive optimizer works in: D = √v̂ + ε, from its second moments as they are before the step.

Adam moves the weights by −η D⁻¹ m̂. D⁻¹ is formed block by block where it is needed and never stored.
"""

from __future__ import annotations

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


def preconditioner_of(optimizer: torch.optim.Optimizer, parameter: Any, group: dict[str, Any]) -> Preconditioner | None:
    """D of one parameter, from the optimizer's state."""
    state = optimizer.state.get(parameter)
    if not state:
        return None
    if second_moment(group) not in state:
        raise _unreadable(optimizer)
    second = state[second_moment(group)]
    count = state["step"] if "step" in state else group["step"]  # fused kernels count per group
    correction = 1.0 - group["betas"][1] ** float(count)
    return Preconditioner(second.to_local() if hasattr(second, "to_local") else second, correction, group["eps"])


def preconditioners_of(optimizer: torch.optim.Optimizer, parameters: list[Any]) -> Preconditioners | None:
    """D of the given parameters; None before the optimizer's first step."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found = [preconditioner_of(optimizer, p, groups[id(p)]) for p in parameters]
    return found if any(known is not None for known in found) else None
