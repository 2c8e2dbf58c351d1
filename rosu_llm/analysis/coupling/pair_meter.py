"""The passes of one pair: two gradients, then losses at points along both perturbations. No weight stays changed.

Memory: f is captured, r stays where backward leaves it, and the perturbation has its backup of the weights: besides the
gradient any training has, that is one gradient and one copy of the trainable weights. Losses at w+ρu need no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isfinite, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import NonFiniteError
from ...geometry import F, Gram, Inner, R, Rosu, Stabilizer, coupling
from ...geometry.methods.minmax import MinMax
from ...space import ParameterSpace
from ...space.parts import part_products
from ...step import Closure
from ...step.replay import RandomState
from .pair import PairRecord, Ray
from .parts import Layout

#: ‖f‖², ⟨f, r⟩ and ‖r‖², the columns of the products by part.
_PRODUCTS = (("f", "f"), ("f", "r"), ("r", "r"))

#: Step of the central difference in units of the smallest ρ: the curvature at w, not that of the whole segment.
CURVATURE_STEP = 0.25


class PairMeter:
    """Measures one pair after the other in a parameter space.

    Args:
        space: where weights and gradients live.
        layout: the parts of the model.
        rhos: radii at which losses are measured, ascending.
        stabilizer, eps_q: τ and ε_q of the projection.
        devices: devices whose random state the model may use.
        mean_over_ranks: averages a small float64 tensor over processes.
        dtype: the type the model computes in, for the size of rounding errors.
    """

    def __init__(
        self,
        space: ParameterSpace,
        layout: Layout,
        rhos: Sequence[float],
        *,
        stabilizer: Stabilizer,
        eps_q: float,
        devices: Iterable[torch.device],
        mean_over_ranks: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> None:
        self.space, self.layout, self.rhos = space, layout, tuple(rhos)
        self._stabilizer = stabilizer
        self._rules: dict[str, MinMax | Rosu] = {
            "standard": MinMax(eps_q=eps_q),
            "neutral": Rosu(tau=stabilizer.tau, tau_mode=stabilizer.mode, eps_q=eps_q),
        }
        self._random = RandomState.now(devices)
        self._mean = mean_over_ranks
        self._rounding = _rounding(dtype)

    def measure(
        self, pair: int, forget: Sequence[Closure], retain: Sequence[Closure]
    ) -> tuple[PairRecord, NDArray[np.float64]]:
        """The pair's record, and ‖f‖², ⟨f, r⟩, ‖r‖² of each part; NonFiniteError where something is NaN or infinite."""
        space = self.space
        space.begin()
        forget_loss = self._loss("forget", forget, backward=True)
        space.capture("f")
        retain_loss = self._loss("retain", retain, backward=True)
        space.hold("r")
        gram = space.gram(["f", "r"])
        bad = [name for name, vector in (("f", F), ("r", R)) if not isfinite(gram(vector, vector))]
        if bad:
            raise NonFiniteError(f"the gradient {' and '.join(bad)} has NaN or infinite entries")
        products = part_products(space, _PRODUCTS, self.layout.numbers).numpy()
        base = (forget_loss, retain_loss)
        standard = self._ray("standard", gram, base, forget, retain)
        neutral = self._ray("neutral", gram, base, forget, retain)
        geometry = coupling(gram, 1.0)
        retain_square = gram(R, R)
        record = PairRecord(
            pair=pair,
            forget_loss=forget_loss,
            retain_loss=retain_loss,
            cosine=geometry.cosine,
            sine=geometry.sine,
            forget_norm=gram.norm(F),
            retain_norm=sqrt(retain_square),
            retain_square=retain_square,
            q_norm=self._inner("neutral", gram).direction_norm,
            residue=self._stabilizer.residue(retain_square),
            resolution=self._rounding * abs(retain_loss),
            standard=standard,
            neutral=neutral,
        )
        return record, products

    def _inner(self, name: str, gram: Gram) -> Inner:
        """The perturbation of radius 1, as the training step would make it."""
        return self._rules[name].inner(gram, 1.0)

    def _ray(
        self,
        name: str,
        gram: Gram,
        base: tuple[float, float],
        forget: Sequence[Closure],
        retain: Sequence[Closure],
    ) -> Ray | None:
        inner = self._inner(name, gram)
        if inner.fallback:
            return None
        forgets, retains, arrived = [], [], []
        for rho in self.rhos:
            with self.space.perturbed(rho * inner.delta, precise=inner.precise) as realized:
                where = f" at ρ={rho:g} along the {name} perturbation"
                forgets.append(self._loss("forget", forget, where=where) - base[0])
                retains.append(self._loss("retain", retain, where=where) - base[1])
                arrived.append(realized.fraction)
        return Ray(
            retain_slope=gram.dot(R, inner.delta),
            forget_slope=gram.dot(F, inner.delta),
            retain=tuple(retains),
            forget=tuple(forgets),
            curvature=self._curvature(inner, base[1], retain),
            realized=min(arrived),
        )

    def _curvature(self, inner: Inner, base: float, retain: Sequence[Closure]) -> float:
        """uᵀ∇²L_r u ≈ (L_r(w+hu) − 2L_r(w) + L_r(w−hu))/h².

        A central difference is free of third-order terms, and exact for quadratic losses.
        """
        step = CURVATURE_STEP * self.rhos[0]
        changes = 0.0
        for sign in (1.0, -1.0):
            with self.space.perturbed(sign * step * inner.delta, precise=inner.precise):
                changes += self._loss("retain", retain, where=f" at ρ={sign * step:g}") - base
        return changes / step**2

    def _loss(self, part: str, closures: Sequence[Closure], *, backward: bool = False, where: str = "") -> float:
        """The window's loss over all processes; with ``backward`` its gradient is accumulated too."""
        self._random.restore()
        total = torch.zeros(1, dtype=torch.float64)
        for i, closure in enumerate(closures):
            last = i + 1 == len(closures)
            with self.space.micro_batch(last=last) if backward else torch.no_grad():
                loss = closure()
                if backward:
                    self.space.backward(loss)
            total += loss.detach().to("cpu", torch.float64).reshape(1)
        value = float(self._mean(total)[0])
        if not isfinite(value):
            raise NonFiniteError(f"the {part} loss is {value}{where}")
        return value


def _rounding(dtype: torch.dtype) -> float:
    """Relative change of a loss that may be rounding: 64 units in the last place, or one of a half-precision type.

    A loss computed in half precision is still averaged in float32, over tokens whose errors differ.
    """
    epsilon = torch.finfo(dtype).eps
    return epsilon if epsilon > 1e-4 else 64.0 * epsilon
