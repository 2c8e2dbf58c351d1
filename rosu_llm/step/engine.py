"""The passes over a window, in order, and the gradient they end in.

A *window* is everything one update is made of: all micro-batches of the gradient accumulation, on all
ranks. f and r are accumulated over the whole window at fixed w, δ is built once, all retain
micro-batches are replayed at w+δ, and one gradient results. Doing this per micro-batch would be
another algorithm. The engine knows neither trainer nor loss: a micro-batch is a function that returns
its share of the window's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor, nn

from ..errors import DataError, NonFiniteError
from ..geometry import Gram, Inner, Rule, Vector
from ..space import ParameterSpace, Realized
from .replay import RandomState, frozen_statistics

Closure = Callable[[], Tensor]

#: The names under which a rule knows the gradient of each loss.
SLOT = {"forget": "f", "retain": "r"}


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
    """

    losses: Mapping[str, float]
    gram: Gram
    inner: Inner | None = None
    realized: Realized | None = None
    vector: Vector = field(default_factory=Vector)
    amplified: Vector = field(default_factory=Vector)
    skipped: bool = False

    @property
    def objective(self) -> float:
        """The loss the outer step descends: at the surrogate point where there is one."""
        for name in ("surrogate", "retain", "forget"):
            if name in self.losses:
                return self.losses[name]
        raise KeyError("no pass was run")


#: Given the losses at w and δ, what is to be subtracted from v (amplification through the optimizer).
Amplification = Callable[[Mapping[str, float], Inner], Vector]


class StepEngine:
    """Runs a rule's passes in a parameter space.

    Args:
        rule: the method.
        space: where weights and gradients live.
        module: the model; its BatchNorm statistics are protected in the perturbed pass.
        devices: devices whose random state dropout uses.
        mean_over_ranks: averages a small float64 tensor over processes.
        loss_scaling: gradients may overflow and be skipped (fp16) instead of being an error.
    """

    def __init__(
        self,
        rule: Rule,
        space: ParameterSpace,
        *,
        module: nn.Module | None = None,
        devices: Iterable[torch.device] = (),
        mean_over_ranks: Callable[[Tensor], Tensor] | None = None,
        loss_scaling: bool = False,
    ) -> None:
        self.rule = rule
        self.space = space
        self._module = module
        self._devices = tuple(devices)
        self._mean = mean_over_ranks or (lambda values: values)
        self._loss_scaling = loss_scaling

    def run(
        self,
        window: Mapping[str, Sequence[Closure]],
        *,
        rho: float,
        amplification: Amplification | None = None,
        seed: int = 0,
    ) -> Outcome:
        """All passes of one update; on return ``.grad`` holds the gradient for the optimizer.

        If anything raises, the weights are exactly what they were and no gradient is left behind.
        """
        for name in self.rule.passes:
            if not window.get(name):
                raise DataError(f"The window has no {name!r} micro-batch; this method needs {self.rule.passes}.")
        try:
            return self._run(window, rho, amplification, seed)
        except BaseException:
            self.space.begin()
            raise

    def _run(
        self, window: Mapping[str, Sequence[Closure]], rho: float, amplification: Amplification | None, seed: int
    ) -> Outcome:
        space, rule = self.space, self.rule
        space.begin()
        losses: dict[str, float] = {}
        states: dict[str, RandomState] = {}
        for i, name in enumerate(rule.passes):
            states[name] = RandomState.now(self._devices)
            losses[name] = self._pass(name, window[name])
            if rule.perturbs or i + 1 < len(rule.passes):
                space.capture(SLOT[name])
            else:
                space.hold(SLOT[name])
        names = [SLOT[name] for name in rule.passes]
        gram = space.gram(names)
        if not self._usable(gram):
            return self._skip(losses, gram)
        if not rule.perturbs:
            vector = rule.outer(gram, None)
            space.write_gradient(vector)
            return Outcome(losses, gram, vector=vector)

        inner = rule.inner(gram, rho)
        realized: Realized | None = None
        if not inner.fallback:
            with (
                space.perturbed(inner.delta, precise=inner.precise, seed=seed) as realized,
                frozen_statistics(self._module),
            ):
                states[rule.surrogate].restore()
                name = "surrogate" if rule.surrogate == "retain" else "forget_surrogate"
                losses[name] = self._pass(name, window[rule.surrogate])
            space.hold("s")
            gram = space.gram([*names, "s"], known=gram)
            if not self._usable(gram):
                return self._skip(losses, gram)
            if rule.curves:
                for part, direction in rule.curvature(gram, inner).items():
                    states[part].restore()
                    space.hessian_product(window[part], direction, into=f"h{SLOT[part]}")
        vector = rule.outer(gram, inner)
        amplified = Vector()
        if amplification is not None and rule.pulls and not inner.fallback:
            amplified = amplification(losses, inner)
        space.write_gradient(vector - amplified, precise=inner.precise)
        return Outcome(losses, gram, inner, realized, vector, amplified)

    def _pass(self, name: str, closures: Sequence[Closure]) -> float:
        shares: list[Tensor] = []
        for i, closure in enumerate(closures):
            with self.space.micro_batch(last=i + 1 == len(closures)):
                loss = closure()
                shares.append(loss.detach())
                self.space.backward(loss)
        total = torch.stack([share.reshape(()) for share in shares]).sum().to("cpu", torch.float64)
        value = float(self._mean(total.reshape(1))[0])
        if not isfinite(value):
            bad = [i for i, share in enumerate(shares) if not torch.isfinite(share).all()]
            where = f" (micro-batches {bad} of {len(shares)} here)" if bad else ""
            raise NonFiniteError(
                f"The {name} loss is {value}{where}; the weights were left as they were. "
                "Lower learning_rate or rho, check the data, or train in bf16/float32 instead of fp16."
            )
        return value

    def _usable(self, gram: Gram) -> bool:
        bad = sorted({name for pair, value in gram.products.items() if not isfinite(value) for name in pair})
        if not bad:
            return True
        if self._loss_scaling:
            return False
        raise NonFiniteError(
            f"The gradient {'/'.join(bad)} has NaN or infinite entries although the loss is finite; the weights were "
            "left as they were. Lower learning_rate or rho, or compute in float32 or bf16."
        )

    def _skip(self, losses: Mapping[str, float], gram: Gram) -> Outcome:
        self.space.discard_gradient()
        return Outcome(losses, gram, skipped=True)
