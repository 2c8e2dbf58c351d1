"""One update of the weights, from schedules to pull: what the trainer holds, and what any PyTorch loop can use.

step = UnlearningStep(model, optimizer, rho=0.4)
for forget, retain in batches:
    logs = step(lambda: loss(model, forget), lambda: loss(model, retain))
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, DataError, PerturbedWeightsError, unknown
from ..geometry import BaseRule, Inner, Vector, build_rule
from ..geometry.methods.others.ssd import SSD
from ..geometry.slots import MEMORY
from ..space import LocalSpace, ParameterSpace
from ..space.fisher import Dampened
from .calibration import Calibration
from .engine import Closure, Outcome, StepEngine
from .fisher_sweep import FisherSweep
from .logs import metrics, pull_metrics
from .pull import NEGLIGIBLE, resolve
from .schedules import AutoRadius, BetaSchedule, RhoSchedule

logger = logging.getLogger(__name__)

#: Below this share of δ in the type the model computes in, a warning is due.
_BARELY_REALIZED = 0.5


@dataclass(frozen=True)
class _PendingPull:
    """What is added to the weights once the optimizer has stepped."""

    inner: Inner
    beta: float
    factor: float


class UnlearningStep:
    """One call, one update of the weights.

    Where somebody else runs the optimizer (a trainer), use :meth:`compute` before its step and
    :meth:`after_optimizer_step` after it.

    Args:
        model: the module whose parameters ``optimizer`` holds.
        optimizer: any torch optimizer; its parameters span the geometry.
        method: a name in :data:`rosu_llm.geometry.METHODS`.
        rho: perturbation radius ρ, or ``auto``: the one that raises the retain loss by ``rho_share`` of it.
        rho_schedule: ``constant`` or ``cosine``; the latter needs ``total_steps``.
        beta: ``tied`` (β = η/ρ), ``two_phase`` (needs ``total_steps``) or a number.
        beta_start, beta_high, beta_low, beta_warmup_ratio: the levels of ``two_phase``.
        amplify: ``auto``, ``direct``, ``optimizer`` or ``matched``.
        kappa: length of the matched pull in units of the optimizer's step.
        capture_dtype: ``float32``, or ``bfloat16``: gradients kept within a step are rounded to it, half their memory.
            δ is orthogonal to the rounded retain gradient, so at most 2⁻⁹ of it lies along the true one.
        capture_device: ``model``, or ``cpu``: they and the backup of the weights are kept in host memory.
        calibration: fades the pull as the forget loss reaches that of unseen data.
        total_steps: length of the run, for schedules.
        space: where the parameters live; a :class:`~rosu_llm.space.LocalSpace` over the optimizer's unless given
            (:func:`~rosu_llm.space.select_space` finds the one that fits a wrapped model).
        mean_over_ranks: averages a small tensor over processes; needed when there are several.
        devices: devices whose random state dropout uses; the model's unless given.
        loss_scaling: gradients may overflow and be skipped (fp16) instead of being an error.
        options: further options of the method: ``jacobian``, ``tau``, ``protect_rank``, ``metric``, …
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        method: str = "rosu",
        rho: str | float = 0.4,
        rho_schedule: str = "constant",
        rho_share: float = 0.1,
        beta: str | float = "tied",
        beta_start: float = BetaSchedule.start,
        beta_high: float = BetaSchedule.high,
        beta_low: float = BetaSchedule.low,
        beta_warmup_ratio: float = BetaSchedule.warmup_ratio,
        amplify: str = "auto",
        kappa: float = 0.5,
        capture_dtype: str = "float32",
        capture_device: str = "model",
        calibration: Calibration | None = None,
        total_steps: int = 0,
        space: ParameterSpace | None = None,
        mean_over_ranks: Callable[[Tensor], Tensor] | None = None,
        devices: Iterable[torch.device] | None = None,
        loss_scaling: bool = False,
        **options: Any,
    ) -> None:
        self.optimizer = optimizer
        self.calibration = calibration
        if isinstance(rho, str) and rho != "auto":
            raise ConfigError(f"rho={rho!r} is no number: give one such as 0.4, without quotes, or 'auto'.")
        self.radius = AutoRadius(rho_share) if rho == "auto" else None
        self._rho = RhoSchedule(1.0 if isinstance(rho, str) else rho, rho_schedule)
        self._beta = BetaSchedule(beta, beta_start, beta_high, beta_low, beta_warmup_ratio)
        self._total, self._count = total_steps, 0
        self.rule = build_rule(method, **options)
        self._rank: int | None = options.get("protect_rank")
        self.amplifier = resolve(amplify, beta, kappa, optimizer, alone=options.get("components") == "delta_only")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.space = LocalSpace(parameters) if space is None else space
        check_capture(capture_dtype, capture_device, self.rule)
        self.space.capture_dtype = torch.bfloat16 if capture_dtype == "bfloat16" else None
        self.space.capture_on_host = capture_device == "cpu"
        self.space.measures_steps = self.rule.pulls and self.amplifier.mode != "optimizer"
        self.engine = StepEngine(
            self.rule,
            self.space,
            module=model,
            devices={p.device for p in model.parameters()} if devices is None else devices,
            mean_over_ranks=mean_over_ranks,
            loss_scaling=loss_scaling,
            optimizer=optimizer,
        )
        #: What is collected of a rule that changes the weights in its last step only.
        self.sweep = FisherSweep(self.rule, self.space) if isinstance(self.rule, SSD) else None
        self._dampened: Dampened | None = None
        self._pending: _PendingPull | None = None
        self._factor = 1.0
        self._refreshed = False
        #: A factor on every pull, for those who want less of it from some step on.
        self.pull_scale = 1.0
        self._warned: set[str] = set()
        self._guard = guard_optimizer(optimizer, self.space)
        if self.rule.pulls:
            self._announce(amplify)

    def __call__(
        self,
        forget: Closure | Sequence[Closure],
        retain: Closure | Sequence[Closure] = (),
        samples: Sequence[Closure] = (),
        mismatch: Closure | Sequence[Closure] = (),
    ) -> dict[str, float]:
        """Take one step; each closure returns its share of the loss of its part (their sum is the loss).

        ``mismatch`` is the loss of wrong answers to the forget questions, for ``method="llmu"``. Of ``method="scrub"``
        a step takes one part: leave the other empty. Those of ``method="ssd"`` return the loss of one sample each.

        ``samples`` are for methods that protect per-sample gradients: each returns the loss of one retain example.
        With several processes a closure's gradient is averaged over them: the process that owns the example returns
        its loss times their number, the others any loss times zero.
        """
        if self._rank is not None and len(samples) < self.rule.samples:
            raise DataError(
                f"protect_rank={self._rank} is larger than the retain window, which has {len(samples)} samples: pass "
                "more in samples=, or lower protect_rank."
            )
        window = {"forget": _closures(forget), "retain": _closures(retain), "mismatch": _closures(mismatch)}
        values = self.logs(self.compute(window, samples, step=self._count, total=self._total))
        if self.sweep is None and self.space.step(self.optimizer):
            values.update(self.after_optimizer_step())
        self.optimizer.zero_grad(set_to_none=True)
        self._count += 1
        return values

    def store(self, parts: Sequence[Closure | Sequence[Closure]]) -> None:
        """Store the gradient of each part of the retain data, for ``method="forget_only"``, before the first step."""
        self.engine.store([_closures(part) for part in parts])

    def refresh_due(self, step: int | None = None) -> bool:
        """Whether :meth:`refresh` must precede update number ``step`` (by default the next one of this loop)."""
        every, at = self.rule.refreshes, self._count if step is None else step
        return every > 0 and (at % every == 0 or MEMORY not in self.space.memory)

    def refresh(self, retain: Closure | Sequence[Closure]) -> None:
        """Take the gradient of the whole retain data at the weights as they are, for ``memory_refresh``.

        Each closure returns its share of that loss. Where :meth:`refresh_due` says so, this goes before the step.
        """
        self.engine.refresh(_closures(retain))
        self._refreshed = True

    def compute(
        self,
        window: Mapping[str, Sequence[Closure]],
        samples: Sequence[Closure] = (),
        *,
        step: int,
        total: int,
        remaining: Callable[[], float] | None = None,
    ) -> Outcome:
        """All passes of update number ``step`` of ``total``; on return ``.grad`` holds the optimizer's gradient.

        ``remaining`` says, after the passes at w, which share of the forgetting is still to be done (bounded losses):
        perturbation and pull are that much shorter.
        """
        if self.sweep is not None:
            return self._collect(self.sweep, window, step, total)
        # a group that is frozen by a learning rate of 0 is not the one whose steps are amplified
        learning_rate = next((float(g["lr"]) for g in self.optimizer.param_groups if float(g["lr"])), 0.0)
        if total <= 0:
            self._refuse_schedules()
        if self.refresh_due(step) and not self._refreshed:
            raise DataError(
                f"memory_refresh={self.rule.refreshes} needs the gradient of the whole retain data at step {step}: "
                "call refresh() with its loss where refresh_due() says so, before the step."
            )
        self._refreshed = False
        rho = self._rho.at(step, total) if self.radius is None else self.radius.at(self.space.weight_norm)
        beta = self._beta.at(step, total, learning_rate, rho)
        self._pending, self._factor = None, 1.0
        if self.calibration is not None:
            self.calibration.refresh(step)

        left = 1.0

        def radius() -> float:
            nonlocal left
            left = 1.0 if remaining is None else remaining()
            return rho * left

        def amplification(losses: Mapping[str, float], inner: Inner) -> Vector:
            if self.calibration is not None:
                self._factor = self.calibration.factor(losses)
            return self.pull_scale * self._factor * self.amplifier.in_gradient(inner, beta, learning_rate)

        outcome = self.engine.run(window, rho=radius, amplification=amplification, seed=step, samples=samples)
        inner = outcome.inner
        if self.radius is not None and inner is not None and not inner.fallback:
            self.radius.observe(outcome.losses, inner.alpha * inner.direction_norm)
        pulls_after = self.rule.pulls and self.amplifier.mode != "optimizer" and learning_rate > 0.0
        if pulls_after and inner is not None and not inner.fallback:
            # βδ is shorter already; the matched pull is measured by the optimizer's step instead.
            matched = self.amplifier.mode == "matched"
            self._pending = _PendingPull(inner, beta, self.pull_scale * self._factor * (left if matched else 1.0))
        return outcome

    def _collect(self, sweep: FisherSweep, window: Mapping[str, Sequence[Closure]], step: int, total: int) -> Outcome:
        if total <= 0:
            raise ConfigError(
                "method='ssd' changes the weights in its last step: pass total_steps=N, the length of the sweep."
            )
        outcome = self.engine.collect(window, sweep)
        if step + 1 >= total:
            self._dampened = sweep.finish()
        return outcome

    def after_optimizer_step(self) -> dict[str, float]:
        """Add the pull, if one is due; what to log of it."""
        if self._pending is None:
            return {}
        due, self._pending = self._pending, None
        pull = self.amplifier.after_step(self.space, due.inner, due.beta, due.factor)
        if pull.length > 0.0 and pull.ratio < NEGLIGIBLE * due.factor:
            self._warn(
                "negligible",
                f"The amplification is {pull.ratio:.1e} of the optimizer's step: it does practically nothing "
                f"(amplify={self.amplifier.mode!r}, beta={self._beta.beta!r}). Use amplify='matched', or a larger "
                "numeric beta.",
            )
        return pull_metrics(pull)

    def logs(self, outcome: Outcome) -> dict[str, float]:
        """The numbers of the passes, by the names they are logged under."""
        values = metrics(outcome, self.rule.stabilizer)
        if self.radius is not None and outcome.inner is not None and not outcome.inner.fallback:
            values.update(self.radius.seen)
        if self._dampened is not None:
            values["ssd/selected"] = self._dampened.selected / max(1, self._dampened.informed)
            values["ssd/kept"] = self._dampened.kept
        if self.calibration is not None:
            values["calibrate/scale"] = self._factor
            if self.calibration.measures and self.calibration.target is not None:
                values["loss/holdout"] = self.calibration.target
        if values.get("perturb/realized", 1.0) < _BARELY_REALIZED:
            self._warn(
                "realized",
                f"Only {values['perturb/realized']:.0%} of the perturbation survived rounding to the type the model "
                "computes in. Raise rho, or compute in float32.",
            )
        return values

    def release(self) -> None:
        """Detach from the optimizer and give back the memory of captured gradients and backup."""
        self._guard.remove()
        self.space.release()

    def _announce(self, amplify: str) -> None:
        logger.info("amplify=%s resolves to %s", amplify, self.amplifier.mode)
        if self.amplifier.mode == "optimizer" and not self._beta.tied:
            self._warn(
                "optimizer-beta",
                f"beta={self._beta.beta!r} through the optimizer divides δ by the learning rate, so an adaptive "
                "optimizer sees little but the pull. Use amplify='direct' with this beta, or beta='tied'.",
            )
        if self.amplifier.mode == "direct" and len({g["lr"] for g in self.optimizer.param_groups}) > 1:
            self._warn(
                "group-lr",
                "The optimizer's parameter groups have different learning rates; the tied β uses the first that is "
                "not 0, so that the pull stays one retain-neutral vector.",
            )

    def _refuse_schedules(self) -> None:
        """Raise for what moves over a run whose length is not known, and would silently stand still."""
        for name, value in (("rho_schedule", self._rho.kind), ("beta", self._beta.beta)):
            if value in ("cosine", "two_phase"):
                raise ConfigError(f"{name}={value!r} needs total_steps, the length of the run: pass total_steps=N.")

    def _warn(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message)


def check_capture(dtype: str, device: str, rule: BaseRule) -> None:
    """Raise for a type or place of captured gradients that cannot be."""
    for name, value, known in (
        ("capture_dtype", dtype, ("float32", "bfloat16")),
        ("capture_device", device, ("model", "cpu")),
    ):
        if value not in known:
            raise unknown(name, value, known)
    if device == "cpu" and rule.metric != "euclidean":
        raise ConfigError(
            f"capture_device='cpu' cannot be combined with metric={rule.metric!r}, which makes one more gradient on "
            "the device: use metric='euclidean', or save memory with capture_dtype='bfloat16'."
        )


def _closures(given: Closure | Sequence[Closure]) -> Sequence[Closure]:
    return [given] if callable(given) else given


def guard_optimizer(optimizer: torch.optim.Optimizer, space: ParameterSpace) -> Any:
    """Refuse to step while the weights are perturbed; returns the hook's handle."""

    def refuse(*_: Any) -> None:
        if space.is_perturbed:
            raise PerturbedWeightsError(
                "optimizer.step() was called inside the perturbed pass: the step would start from w+δ and be undone."
            )

    return optimizer.register_step_pre_hook(refuse)
