"""What one step computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..geometry import Gram, Inner, Vector
from ..geometry.subspace import Subspace
from ..space import Realized


@dataclass(frozen=True)
class Outcome:
    """What one step computed.

    Attributes:
        losses: value of each pass: ``forget``, ``retain``, and at w+δ ``surrogate`` (of the retain loss) or
            ``forget_surrogate``.
        gram: inner products of all captured gradients.
        inner: the perturbation; None for rules without one.
        realized: what became of it in the arithmetic of the model; None where there was none.
        vector: v, the descent gradient, without amplification.
        amplified: what was subtracted from v before it was handed to the optimizer.
        skipped: gradients overflowed under loss scaling; the optimizer step will be skipped.
        protected: the span of per-sample retain gradients, for rules that protect one.
    """

    losses: Mapping[str, float]
    gram: Gram
    inner: Inner | None = None
    realized: Realized | None = None
    vector: Vector = field(default_factory=Vector)
    amplified: Vector = field(default_factory=Vector)
    skipped: bool = False
    protected: Subspace | None = None

    @property
    def objective(self) -> float:
        """The loss the outer step descends: at the surrogate point where there is one."""
        for name in ("surrogate", "retain", "forget"):
            if name in self.losses:
                return self.losses[name]
        raise KeyError("no pass was run")
