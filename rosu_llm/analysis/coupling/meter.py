"""The passes of one pair: two gradients, then losses at points along both perturbations. Weights are restored.

Memory: f is captured, r stays in ``.grad``, and a perturbation keeps a backup of the weights. Beyond the gradient that
any training needs, that is one gradient and one copy of the trainable weights. Losses at w+ρu need no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt

import torch

from ...errors import NonFiniteError
from ...geometry import F, Gram, Inner, R, Rosu, Stabilizer, coupling
from ...geometry.methods.minmax import MinMax
from ...space import ParameterSpace
from ...space.parts import part_products
from ...space.replay import RandomState
from ...step import Closure
from ...training.config import MethodArguments
from ...training.window import PARTS
from .pairs import PairWindows
from .parts import ModelParts
from .record import PairRecord, Ray

#: ‖f‖², ⟨f, r⟩ and ‖r‖², the columns of the products by part.
_PRODUCTS = (("f", "f"), ("f", "r"), ("r", "r"))

#: Step of the central difference in units of the smallest ρ: short, as the curvature at w is wanted.
CURVATURE_STEP = 0.25


class PairMeter:
    """Measures one pair after the other.

    Args:
        windows: the pairs, and the model.
        space: where weights and gradients live.
        settings: τ and ε_q of the projection.
        dtype: the type the model computes in, for the size of rounding errors.
    """

    def __init__(
        self, windows: PairWindows, space: ParameterSpace, settings: MethodArguments, dtype: torch.dtype
    ) -> None:
        self._windows, self._space, self._rhos = windows, space, windows.plan.measured
        self.parts = ModelParts.of(windows.model)
        self._stabilizer = Stabilizer(settings.tau, settings.tau_mode)
        self._rules: dict[str, MinMax | Rosu] = {
            "standard": MinMax(eps_q=settings.eps_q),
            "neutral": Rosu(tau=settings.tau, tau_mode=settings.tau_mode, eps_q=settings.eps_q),
        }
        #: Every pass begins with the same random numbers.
        self._random = RandomState.now({p.device for p in windows.model.parameters()})
        # Relative rounding errors of a loss: 64 units in the last place, but one unit of a half-precision type. There
        # the loss is still averaged in float32, over tokens whose errors partly cancel.
        epsilon = torch.finfo(dtype).eps
        self._rounding = epsilon if epsilon > 1e-4 else 64.0 * epsilon

    def measure(self, pair: int) -> PairRecord:
        """The pair's record; NonFiniteError where something is NaN or infinite."""
        forget, retain = (self._windows.closures(part, pair) for part in PARTS)
        space = self._space
        space.begin()
        forget_loss = self._loss("forget", forget, backward=True)
        space.capture("f")
        retain_loss = self._loss("retain", retain, backward=True)
        space.hold("r")
        gram = space.gram(["f", "r"])
        bad = [name for name, vector in (("f", F), ("r", R)) if not isfinite(gram(vector, vector))]
        if bad:
            raise NonFiniteError(f"the gradient {' and '.join(bad)} has NaN or infinite entries")
        products = part_products(space, _PRODUCTS, self.parts.numbers).numpy()
        # The perturbations of radius 1, as a training step would make them.
        inners = {name: rule.inner(gram, 1.0) for name, rule in self._rules.items()}
        base = (forget_loss, retain_loss)
        rays = {name: self._ray(name, inner, gram, base, forget, retain) for name, inner in inners.items()}
        geometry = coupling(gram, 1.0)
        retain_square = gram(R, R)
        return PairRecord(
            pair=pair,
            rhos=self._rhos,
            forget_loss=forget_loss,
            retain_loss=retain_loss,
            cosine=geometry.cosine,
            sine=geometry.sine,
            forget_norm=gram.norm(F),
            retain_norm=sqrt(retain_square),
            retain_square=retain_square,
            q_norm=inners["neutral"].direction_norm,
            residue=self._stabilizer.residue(retain_square),
            resolution=self._rounding * abs(retain_loss),
            products=products,
            **rays,
        )

    def _ray(
        self,
        name: str,
        inner: Inner,
        gram: Gram,
        base: tuple[float, float],
        forget: Sequence[Closure],
        retain: Sequence[Closure],
    ) -> Ray | None:
        if inner.fallback:
            return None
        forgets, retains, realized = [], [], []
        for rho in self._rhos:
            with self._space.perturbed(rho * inner.delta, precise=inner.precise) as perturbation:
                where = f" at ρ={rho:g} along the {name} perturbation"
                forgets.append(self._loss("forget", forget, where=where) - base[0])
                retains.append(self._loss("retain", retain, where=where) - base[1])
                realized.append(perturbation.fraction)
        return Ray(
            retain_slope=gram.dot(R, inner.delta),
            forget_slope=gram.dot(F, inner.delta),
            retain=tuple(retains),
            forget=tuple(forgets),
            curvature=self._curvature(inner, base[1], retain),
            realized=min(realized),
        )

    def _curvature(self, inner: Inner, base: float, retain: Sequence[Closure]) -> float:
        """uᵀ∇²L_r u ≈ (L_r(w+hu) − 2L_r(w) + L_r(w−hu))/h².

        A central difference is free of third-order terms, and exact for quadratic losses.
        """
        step = CURVATURE_STEP * self._rhos[0]
        changes = 0.0
        for sign in (1.0, -1.0):
            with self._space.perturbed(sign * step * inner.delta, precise=inner.precise):
                changes += self._loss("retain", retain, where=f" at ρ={sign * step:g}") - base
        return changes / step**2

    def _loss(self, part: str, closures: Sequence[Closure], *, backward: bool = False, where: str = "") -> float:
        """The window's loss over all processes; with ``backward`` its gradient is accumulated too."""
        self._random.restore()
        total = torch.zeros(1, dtype=torch.float64)
        for i, closure in enumerate(closures):
            last = i + 1 == len(closures)
            with self._space.micro_batch(last=last) if backward else torch.no_grad():
                loss = closure()
                if backward:
                    self._space.backward(loss)
            total += loss.detach().to("cpu", torch.float64).reshape(1)
        value = float(self._windows.losses[part].mean_over_ranks(total)[0])
        if not isfinite(value):
            raise NonFiniteError(f"the {part} loss is {value}{where}")
        return value
