"""TorchJD's weightings on the same Gram matrix, as ``torchjd.<Name>``: UPGrad, MGDA, DualProj, …

They answer how much of each task's gradient to take, from inner products alone, for tasks that are all minimised: here
−λ_f L_f and λ_r L_r. The package is an extra; nothing of it is written again here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError, unknown
from ..gram import Gram
from ..vector import F, R, Vector
from .base import Inner, Weighted

PREFIX = "torchjd."

#: Those that are a function of the Gram matrix alone: without further arguments, memory or chance.
SUPPORTED = ("AlignedMTL", "DualProj", "IMTLG", "MGDA", "Mean", "PCGrad", "Sum", "UPGrad")


@dataclass(frozen=True, kw_only=True)
class TorchJD(Weighted):
    """v = −c₀ λ_f f + c₁ λ_r r, with c from the named weighting."""

    name: str = "UPGrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        _weighting(self.name)

    def outer(self, gram: Gram, inner: Inner | None) -> Vector:
        import torch

        tasks = (-self.forget_weight * F, self.retain_weight * R)
        matrix = torch.tensor([[gram(a, b) for b in tasks] for a in tasks], dtype=torch.float64)
        weights: list[float] = _weighting(self.name)(matrix).tolist()
        return weights[0] * tasks[0] + weights[1] * tasks[1]


def _weighting(name: str) -> Any:
    if name not in SUPPORTED:
        raise unknown("method", PREFIX + name, [PREFIX + n for n in SUPPORTED])
    try:
        from torchjd import aggregation

        return getattr(aggregation, f"{name}Weighting")()
    except ImportError as error:  # also of the solver that some of them need
        raise ConfigError(f"method={PREFIX + name!r} needs TorchJD: pip install 'rosu-llm[torchjd]'.") from error
