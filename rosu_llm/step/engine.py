"""The passes over a window, in order, and the gradient they end in.

A *window* is everything one update is made of: all micro-batches of the gradient accumulation, on all
ranks. f and r are accumulated over the whole window at fixed w, δ is built once, all retain
micro-batches are replayed at w+δ, and one gradient results. Doing this per micro-batch would be
another algorithm. The engine knows neither trainer nor loss: a micro-batch is a function that returns
its share of the window's loss.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import isfinite, sqrt

import torch
from torch import Tensor, nn

from ..errors import ConfigError, DataError, NonFiniteError
from ..geometry import BaseRule, Gram, Inner, Vector
from ..geometry.slots import GRADIENT, HESSIAN, MEMORY, PRECONDITIONED, RETAIN, SURROGATE, sample_slot, stored_slot
from ..geometry.subspace import Subspace, check_independent
from ..space import ParameterSpace, Realized
from ..space.blocks import work_dtype
from ..space.preconditioner import Preconditioners, check_adaptive
from ..space.replay import RandomState, frozen_statistics
from .fisher_sweep import FisherSweep


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
        amplification_ratio: its length over that of v; None where nothing was.
        skipped: gradients overflowed under loss scaling; the optimizer step will be skipped.
        protected: the span of per-sample retain gradients, for rules that protect one.
    """

    losses: Mapping[str, float]
    gram: Gram
    inner: Inner | None = None
    realized: Realized | None = None
    vector: Vector = field(default_factory=Vector)
    amplified: Vector = field(default_factory=Vector)
    amplification_ratio: float | None = None
    skipped: bool = False
    protected: Subspace | None = None

    @property
    def objective(self) -> float:
        """The loss the outer step descends: at the surrogate point where there is one."""
        for name in ("surrogate", "retain", "forget"):
            if name in self.losses:
                return self.losses[name]
        raise KeyError("no pass was run")


@dataclass(frozen=True)
class _Passed:
    """A pass that was made: the shares of its loss, on their device."""

    name: str
    shares: Sequence[Tensor]

    def total(self) -> Tensor:
        total = torch.stack([share.reshape(()) for share in self.shares]).sum()
        return total.to(work_dtype(total, precise=True))

    def where(self) -> str:
        bad = [i for i, share in enumerate(self.shares) if not torch.isfinite(share).all()]
        return f" (micro-batches {bad} of {len(self.shares)} here)" if bad else ""


logger = logging.getLogger(__name__)

#: Coefficients from here on are refused: float32 could not hold them times a loss scale.
LARGEST = torch.finfo(torch.float32).max / 2**24

Closure = Callable[[], Tensor]

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
        optimizer: whose second moments are the metric, for rules that work in it.
    """

    def __init__(
        self,
        rule: BaseRule,
        space: ParameterSpace,
        *,
        module: nn.Module | None = None,
        devices: Iterable[torch.device] = (),
        mean_over_ranks: Callable[[Tensor], Tensor] | None = None,
        loss_scaling: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.rule = rule
        self.space = space
        self._module = module
        self._devices = tuple(devices)
        self._mean = mean_over_ranks or (lambda values: values)
        self._loss_scaling = loss_scaling
        self._optimizer = optimizer
        self._spanned = False
        self._stored: Gram | None = None
        if rule.metric == "adam":
            if optimizer is None:
                raise ConfigError("metric='adam' reads the optimizer's second moments: pass optimizer=….")
            check_adaptive(optimizer)

    def run(
        self,
        window: Mapping[str, Sequence[Closure]],
        *,
        rho: float | Callable[[], float],
        amplification: Amplification | None = None,
        seed: int = 0,
        samples: Sequence[Closure] = (),
    ) -> Outcome:
        """All passes of one update; on return ``.grad`` holds the gradient for the optimizer.

        ``rho`` may depend on what the passes at w found: it is asked after them.
        ``samples`` give the loss of single retain examples, one each, for rules that protect their gradients. If
        anything raises, the weights are exactly what they were and no gradient is left behind.
        """
        passes = self.rule.passes
        if self.rule.alternates:
            passes = tuple(name for name in passes if window.get(name))
            if len(passes) != 1:
                raise DataError(
                    f"A step of this method takes micro-batches of one of {self.rule.passes}, not of {passes}."
                )
        for name in passes:
            if not window.get(name):
                raise DataError(f"The window has no {name!r} micro-batch; this method needs {self.rule.passes}.")
        if self.rule.stored:
            self._know_stored()
        if self.rule.samples and not 1 <= len(samples) <= self.rule.samples:
            raise DataError(
                f"{len(samples)} single retain samples were given; this method needs 1 to {self.rule.samples}."
            )
        outside = self._outside()
        try:
            return self._run(window, passes, rho, amplification, seed, samples if self.rule.samples else ())
        except BaseException:
            with contextlib.suppress(RuntimeError):  # a device out of memory: what led here is the error to tell
                self.space.abandon()
            raise
        finally:
            for p in outside:  # whoever clips the model's gradients would clip by the sum of all passes
                p.grad = None

    def collect(self, window: Mapping[str, Sequence[Closure]], sweep: FisherSweep) -> Outcome:
        """In place of :meth:`run` for rules that sweep: no gradient is left, so that no optimizer steps on one."""
        outside = self._outside()
        try:
            with frozen_statistics(self._module):
                losses = sweep.collect(window, lambda name, closures: self._settle([self._pass(name, closures)])[name])
            return Outcome(losses, Gram({}))
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self.space.abandon()
            raise
        finally:
            for p in outside:
                p.grad = None

    def store(self, parts: Sequence[Sequence[Closure]]) -> None:
        """Store the gradient of each part of the retain data at the weights as they are, for all steps to come."""
        self._store({stored_slot(i): closures for i, closures in enumerate(parts)})

    def refresh(self, closures: Sequence[Closure]) -> None:
        """Let the memory be the gradient of the whole retain data at the weights as they are, until the next time."""
        self._store({MEMORY: closures})

    def _store(self, parts: Mapping[str, Sequence[Closure]]) -> None:
        outside = self._outside()
        self.space.begin()
        try:
            with frozen_statistics(self._module):
                for i, (name, closures) in enumerate(parts.items()):
                    self._settle([self._pass(f"retain part {i + 1}", closures)])
                    self.space.store(name)
        finally:
            for p in outside:
                p.grad = None

    def _outside(self) -> list[nn.Parameter]:
        """Trainable parameters of the module that the optimizer does not hold, and that have no gradient yet."""
        known = {id(p) for p in getattr(self.space, "parameters", ())}
        every = self._module.parameters() if self._module is not None and known else ()
        return [p for p in every if p.requires_grad and p.grad is None and id(p) not in known]

    def _run(
        self,
        window: Mapping[str, Sequence[Closure]],
        passes: Sequence[str],
        rho: float | Callable[[], float],
        amplification: Amplification | None,
        seed: int,
        samples: Sequence[Closure],
    ) -> Outcome:
        space, rule = self.space, self.rule
        space.begin()
        names = self._sample_passes(samples)
        passed: list[_Passed] = []
        states: dict[str, RandomState] = {}
        for i, name in enumerate(passes):
            states[name] = RandomState.now(self._devices)
            # Forget batches do not enter the running statistics that the model is kept with, where others can.
            kept = frozen_statistics(self._module) if name == "forget" and "retain" in rule.passes else nullcontext()
            with kept:
                passed.append(self._pass(name, window[name]))
            if rule.perturbs or i + 1 < len(passes):
                space.capture(GRADIENT[name])
            else:
                space.hold(GRADIENT[name])
            names.append(GRADIENT[name])
        losses = self._settle(passed)
        preconditioners = self._read_preconditioners()
        if rule.stored or rule.refreshes:
            names += space.recall()
        gram = self._gram(names, preconditioners, known=self._stored)
        if not self._usable(gram):
            return self._skip(losses, gram)
        if rule.remembers is not None:  # only now: a gradient that overflowed must not be remembered
            space.remember(MEMORY, RETAIN, rule.remembers)
            names.append(MEMORY)
            gram = self._gram(names, preconditioners, known=gram)
        protected = self._protected(gram, len(samples))
        if not rule.perturbs:
            vector = rule.outer(gram, None)
            check_coefficients(vector)
            space.write_gradient(vector)
            return Outcome(losses, gram, vector=vector, protected=protected)

        direction = None if preconditioners is None else rule.precondition(gram)
        if preconditioners is not None and direction is not None:
            space.precondition(
                direction,
                preconditioners,
                into=PRECONDITIONED,
                precise=gram.cancels(direction) or bool(gram.dual and gram.dual.cancels(direction)),
            )
            gram = replace(space.gram([*names, PRECONDITIONED], known=gram), dual=gram.dual)
            names.append(PRECONDITIONED)
        inner = rule.inner(gram, rho() if callable(rho) else rho)
        realized: Realized | None = None
        if not inner.fallback:
            check_coefficients(inner.delta)
            with (
                space.perturbed(inner.delta, precise=inner.precise, seed=seed) as realized,
                frozen_statistics(self._module),
            ):
                states[rule.surrogate].restore()
                name = "surrogate" if rule.surrogate == "retain" else "forget_surrogate"
                surrogate = self._pass(name, window[rule.surrogate])
            losses |= self._settle([surrogate], realized)
            space.hold(SURROGATE)
            gram = self._gram([*names, SURROGATE], preconditioners, known=gram)
            if not self._usable(gram):
                return self._skip(losses, gram)
            if rule.needs_hessian:
                with frozen_statistics(self._module):
                    for part, towards in rule.hessian_directions(gram, inner).items():
                        states[part].restore()
                        space.hessian_product(window[part], towards, into=HESSIAN[part])
        vector = rule.outer(gram, inner)
        check_coefficients(vector)
        amplified, ratio = Vector(), None
        if amplification is not None and rule.pulls and not inner.fallback:
            amplified = amplification(losses, inner)
        if amplified.coefficients:  # now: where v cancels it is measured, which the written gradient would be part of
            # Hessian products are no part of the Gram matrix
            size = gram.norm(vector) if gram.knows(vector) else sqrt(space.measure(vector, vector))
            ratio = gram.norm(amplified) / size if size > 0.0 else 0.0
        cancels = gram.knows(vector) and gram.cancels(vector)
        space.write_gradient(vector - amplified, precise=inner.precise or cancels)
        return Outcome(losses, gram, inner, realized, vector, amplified, ratio, protected=protected)

    def _know_stored(self) -> None:
        """Inner products of what is stored, which stay the same."""
        if self._stored is not None:
            return
        if not self.space.memory:
            raise DataError("Nothing of the retain data is stored: call store() with the losses of its parts first.")
        self.space.begin()
        self._stored = self.space.gram(self.space.recall())

    def _read_preconditioners(self) -> Preconditioners | None:
        if self.rule.metric != "adam" or self._optimizer is None:
            return None
        preconditioners = self.space.preconditioners(self._optimizer)
        if preconditioners is None:
            logger.info("metric: adam starts with the next step; the optimizer has no second moments before its first")
        return preconditioners

    def _sample_passes(self, samples: Sequence[Closure]) -> list[str]:
        """One pass per sample, at w and before all others, so that the random numbers of those are not disturbed."""
        names: list[str] = []
        passed: list[_Passed] = []
        with frozen_statistics(self._module):
            for i, closure in enumerate(samples):
                passed.append(self._pass(f"retain sample {i + 1}", [closure]))
                names.append(sample_slot(i))
                self.space.capture(names[-1])
        if passed:
            self._settle(passed)
        return names

    def _gram(self, names: Sequence[str], preconditioners: Preconditioners | None, known: Gram | None = None) -> Gram:
        """Inner products, also in the optimizer's metric if there is one (where D⁻¹q has no part)."""
        gram = self.space.gram(names, known=known)
        if preconditioners is None:
            return gram
        inside = [name for name in names if name != PRECONDITIONED]
        return replace(
            gram, dual=self.space.gram(inside, known=known.dual if known else None, preconditioners=preconditioners)
        )

    def _protected(self, gram: Gram, count: int) -> Subspace | None:
        if not count:
            return None
        if not self._spanned:  # a mistake shows in the first step; later, dependent samples are chance and are dropped
            check_independent(gram, count)
            self._spanned = True
        return self.rule.protected(gram)

    def _pass(self, name: str, closures: Sequence[Closure]) -> _Passed:
        """Accumulate the gradient of all micro-batches; nobody waits for the loss yet."""
        shares: list[Tensor] = []
        for i, closure in enumerate(closures):
            with self.space.micro_batch(last=i + 1 == len(closures)):
                loss = closure()
                shares.append(loss.detach())
                self.space.backward(loss)
        return _Passed(name, shares)

    def _settle(self, passed: Sequence[_Passed], realized: Realized | None = None) -> dict[str, float]:
        """The losses of passes over all processes, read together with what became of a perturbation."""
        totals = self._mean(torch.stack([each.total() for each in passed]))
        if realized is not None and realized.sums.device == totals.device:
            found = torch.cat([totals, realized.sums]).tolist()
            values = found[: len(passed)]
            realized.tell(found[len(passed) :])
        else:
            values = totals.tolist()
        for each, value in zip(passed, values, strict=True):
            if not isfinite(value):
                raise NonFiniteError(
                    f"The {each.name} loss is {value}{each.where()}; the weights were left as they were. "
                    "Lower learning_rate or rho, check the data, or train in bf16/float32 instead of fp16."
                )
        return {each.name: float(value) for each, value in zip(passed, values, strict=True)}

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
        if self.rule.refreshes and not isfinite(gram.products[MEMORY, MEMORY]):
            del self.space.memory[MEMORY]  # it overflowed, too: due again at the next step
        return Outcome(losses, gram, skipped=True)


def check_coefficients(vector: Vector) -> None:
    """Raise where a coefficient is beyond float32, in which gradients are combined.

    Projections off a gradient divide by its length: 10²⁰ off one of 10⁻¹⁸ needs such a coefficient.
    """
    for name, value in vector.coefficients.items():
        if not abs(value) < LARGEST:
            raise NonFiniteError(
                f"The gradient {name} has all but vanished beside the others: the step would take {value:.1e} times "
                "it, which float32 can hardly hold. The weights were left as they were. Usually training has diverged: "
                "lower learning_rate or rho."
            )
