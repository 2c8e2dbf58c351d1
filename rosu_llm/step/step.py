"""ROSU in any PyTorch loop, without a trainer.

step = UnlearningStep(model, optimizer, rho=0.4)
for forget, retain in batches:
    logs = step(lambda: loss(model, forget), lambda: loss(model, retain))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DataError, PerturbedWeightsError
from ..geometry import Inner, Stabilizer, Vector, build_rule
from ..space import LocalSpace, ParameterSpace, TensorSpace
from .engine import Closure, StepEngine
from .logs import metrics, pull_metrics
from .pull import resolve
from .schedules import BetaSchedule, RhoSchedule


class UnlearningStep:
    """One call, one update of the weights.

    Args:
        model: the module whose parameters ``optimizer`` holds.
        optimizer: any torch optimizer; its parameters span the geometry.
        method: a name in :data:`rosu_llm.geometry.METHODS`.
        rho: perturbation radius ρ.
        rho_schedule: ``constant`` or ``cosine``; the latter needs ``total_steps``.
        beta: ``tied`` (β = η/ρ), ``two_phase`` (needs ``total_steps``) or a number.
        amplify: ``auto``, ``direct``, ``optimizer`` or ``matched``.
        kappa: length of the matched pull in units of the optimizer's step.
        total_steps: length of the run, for schedules.
        space: where the parameters live; a :class:`~rosu_llm.space.LocalSpace` over the optimizer's unless given
            (:class:`~rosu_llm.space.FSDP2Space`, :func:`~rosu_llm.space.zero_space`).
        mean_over_ranks: averages a small tensor over processes; needed when there are several.
        options: further options of the method: ``jacobian``, ``tau``, ``protect_rank``, ``metric``, …
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        method: str = "rosu",
        rho: float = 0.4,
        rho_schedule: str = "constant",
        beta: str | float = "tied",
        amplify: str = "auto",
        kappa: float = 0.5,
        total_steps: int = 0,
        space: TensorSpace | None = None,
        mean_over_ranks: Callable[[Tensor], Tensor] | None = None,
        **options: Any,
    ) -> None:
        self.optimizer = optimizer
        self._rho = RhoSchedule(rho, rho_schedule)
        self._beta = BetaSchedule(beta)
        self._total = total_steps
        self._count = 0
        rule = build_rule(method, **options)
        self._rank: int | None = options.get("protect_rank")
        alone = options.get("components") == "delta_only"
        self._amplifier = resolve(amplify, beta, kappa, optimizer, alone=alone)
        self._stabilizer: Stabilizer | None = getattr(rule, "stabilizer", None)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.space = LocalSpace(parameters) if space is None else space
        self.engine = StepEngine(
            rule,
            self.space,
            module=model,
            devices={p.device for p in model.parameters()},
            mean_over_ranks=mean_over_ranks,
            optimizer=optimizer,
        )
        guard_optimizer(optimizer, self.space)

    def __call__(
        self,
        forget: Closure | Sequence[Closure],
        retain: Closure | Sequence[Closure],
        samples: Sequence[Closure] = (),
    ) -> dict[str, float]:
        """Take one step; each closure returns its share of the loss of its part (their sum is the loss).

        ``samples`` are for methods that protect per-sample gradients: each returns the loss of one retain example.
        With several processes a closure's gradient is averaged over them: the process that owns the example returns
        its loss times their number, the others any loss times zero.
        """
        if self._rank is not None and len(samples) < self.engine.rule.samples:
            raise DataError(
                f"protect_rank={self._rank} is larger than the retain window, which has {len(samples)} samples: pass "
                "more in samples=, or lower protect_rank."
            )
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        rho = self._rho.at(self._count, self._total)
        beta = self._beta.at(self._count, self._total, learning_rate, rho)

        def amplification(losses: Mapping[str, float], inner: Inner) -> Vector:
            return self._amplifier.in_gradient(inner, beta, learning_rate)

        window = {"forget": _closures(forget), "retain": _closures(retain)}
        outcome = self.engine.run(window, rho=rho, amplification=amplification, seed=self._count, samples=samples)
        applied = self.space.step(self.optimizer)
        values = metrics(outcome, self._stabilizer)
        inner = outcome.inner
        pulls = self.engine.rule.pulls and self._amplifier.mode != "optimizer" and applied
        if pulls and inner is not None and not inner.fallback:
            values.update(pull_metrics(self._amplifier.after_step(self.space, inner, beta, scale=1.0)))
        self.optimizer.zero_grad(set_to_none=True)
        self._count += 1
        return values


def _closures(given: Closure | Sequence[Closure]) -> Sequence[Callable[[], Tensor]]:
    return [given] if callable(given) else given


def guard_optimizer(optimizer: torch.optim.Optimizer, space: ParameterSpace) -> Any:
    """Refuse to step while the weights are perturbed; returns the hook's handle."""

    def refuse(*_: Any) -> None:
        if space.is_perturbed:
            raise PerturbedWeightsError(
                "optimizer.step() was called inside the perturbed pass: the step would start from w+δ and be undone."
            )

    return optimizer.register_step_pre_hook(refuse)
