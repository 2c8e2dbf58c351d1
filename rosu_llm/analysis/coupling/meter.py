"""The passes of one pair: two gradients, then losses at points along both perturbations. Weights are restored.

Memory: f is captured, r stays in ``.grad``, and a perturbation keeps a backup of the weights. Beyond the gradient that
any training needs, that is one gradient and one copy of the trainable weights. Losses at w+ρu need no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt

import torch

from ...errors import NonFiniteError
from ...geometry import F, Gram, Inner, R, Rosu, Stabilizer, Vector, coupling
from ...geometry.methods.minmax import MinMax
from ...geometry.slots import MEMORY
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

#: The whole retain data's gradient.
WHOLE = MEMORY

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
        self._windows, self._space = windows, space
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
        return self._record(pair, forget, retain, self._windows.plan.measured)

    def measure_whole(self) -> PairRecord:
        """The record of all samples as one pair, numbered 0, at the reported radii alone.

        Its retain gradient stays in the space's memory.
        """
        forget, retain = (self._windows.whole(part) for part in PARTS)
        record = self._record(0, forget, retain, self._windows.plan.reported)
        self._space.store(WHOLE)
        return record

    def cosines(self, pair: int, sizes: tuple[int, int]) -> tuple[float, float]:
        """cos θ of a pair of batches of these sizes, and the cosine of its retain gradient with the whole one."""
        forget, retain = (self._windows.closures(part, pair, n) for part, n in zip(PARTS, sizes, strict=True))
        gram = self._gradients(forget, retain)[0]
        self._space.recall()
        gram = self._space.gram(["f", "r", WHOLE], known=gram)
        whole = Vector({WHOLE: 1.0})
        size = gram.norm(R) * gram.norm(whole)
        return coupling(gram, 1.0).cosine, gram(R, whole) / size if size > 0.0 else 0.0

    def _gradients(self, forget: Sequence[Closure], retain: Sequence[Closure]) -> tuple[Gram, float, float]:
        """f is captured and r held; their inner products, and both losses."""
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
        return gram, forget_loss, retain_loss

    def _record(
        self, pair: int, forget: Sequence[Closure], retain: Sequence[Closure], rhos: Sequence[float]
    ) -> PairRecord:
        space = self._space
        gram, forget_loss, retain_loss = self._gradients(forget, retain)
        products = part_products(space, _PRODUCTS, self.parts.numbers).numpy()
        # The perturbations of radius 1, as a training step would make them.
        inners = {name: rule.inner(gram, 1.0) for name, rule in self._rules.items()}
        base = (forget_loss, retain_loss)
        rays = {name: self._ray(name, inner, gram, base, forget, retain, rhos) for name, inner in inners.items()}
        geometry = coupling(gram, 1.0)
        retain_square = gram(R, R)
        return PairRecord(
            pair=pair,
            rhos=rhos,
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
        rhos: Sequence[float],
    ) -> Ray | None:
        if inner.fallback:
            return None
        forgets, retains, realized = [], [], []
        for rho in rhos:
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
            curvature=self._curvature(inner, base[1], retain, CURVATURE_STEP * rhos[0]),
            realized=min(realized),
        )

    def _curvature(self, inner: Inner, base: float, retain: Sequence[Closure], step: float) -> float:
        """uᵀ∇²L_r u ≈ (L_r(w+hu) − 2L_r(w) + L_r(w−hu))/h².

        A central difference is free of third-order terms, and exact for quadratic losses.
        """
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
