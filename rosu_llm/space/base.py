"""The vector algebra of a parameter space, over lists of local tensors.

A layout says which tensors a process owns (`_truth`: what the optimizer updates; `_visible`: what the next
forward reads), where a finished gradient lies, how scalars are summed over processes, and what must happen
after weights were edited. Everything else is written once, here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from math import sqrt

import torch
from torch import Tensor, nn

from ..errors import PerturbedWeightsError, UnsupportedLayoutError
from ..geometry import Gram, Vector
from .blocks import Sums, blocks, combine, inner, stochastic_round, work_dtype
from .preconditioner import Scales
from .protocol import Realized


class TensorSpace:
    """Capture, inner products, exact perturb and restore over local tensors.

    Holds one copy of the trainable parameters this process owns per captured gradient (two for most methods), and
    the backup from which weights are restored bit for bit. They are allocated once and reused.

    Args:
        compute_dtype: the type the forward pass rounds weights to (autocast); theirs where not given.
    """

    def __init__(self, compute_dtype: torch.dtype | None = None) -> None:
        self._compute_dtype = compute_dtype
        self._captured: dict[str, list[Tensor]] = {}
        self._spare: list[list[Tensor]] = []
        self._live: str | None = None
        self._backup: list[Tensor] | None = None
        self._touched: list[bool] = []
        self._perturbed = False

    # -- what a layout provides -----------------------------------------------------------------

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of one micro-batch."""
        raise NotImplementedError

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of ``loss``."""
        raise NotImplementedError

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Let the optimizer step on the gradient written; False if it was skipped."""
        raise NotImplementedError

    def _truth(self) -> list[Tensor]:
        """The weights the optimizer updates, as this process owns them."""
        raise NotImplementedError

    def owners(self) -> list[nn.Parameter | None]:
        """The parameter each tensor of :meth:`_truth` is a piece of; None for padding."""
        raise NotImplementedError

    def _gradients(self) -> list[Tensor | None]:
        """The accumulated gradient, aligned with :meth:`_truth`; None where a parameter took no part."""
        raise NotImplementedError

    def _clear(self) -> None:
        """Drop the accumulated gradient."""
        raise NotImplementedError

    def _targets(self) -> list[Tensor | None]:
        """Tensors to write the optimizer's gradient into; None for parameters no pass has used."""
        raise NotImplementedError

    def _visible(self) -> list[Tensor]:
        """The weights the next forward reads; those of :meth:`_truth` unless a layout keeps a master copy."""
        return self._truth()

    def _scale(self) -> float:
        """The loss scale that gradients currently carry."""
        return 1.0

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over the processes among which the parameters are sharded."""
        return values

    def _published(self) -> None:
        """The visible weights were edited."""
        # Inside autocast a low-precision copy of each weight may be cached: it is stale now.
        torch.clear_autocast_cache()

    def _committed(self) -> None:
        """The true weights were edited, outside the optimizer."""
        self._published()

    # -- passes ---------------------------------------------------------------------------------

    @property
    def is_perturbed(self) -> bool:
        """Whether the weights currently carry a perturbation."""
        return self._perturbed

    def begin(self) -> None:
        """Forget the previous step's gradients and clear the accumulated one."""
        if self._perturbed:
            raise PerturbedWeightsError("A new step cannot begin while the weights are perturbed.")
        self._spare.extend(self._captured.values())
        self._captured.clear()
        self._live = None
        self._touched = []
        self._clear()

    def capture(self, name: str) -> None:
        """Store the accumulated gradient under ``name``, in place of an earlier one, and clear it."""
        gradients, scale = self._gradients(), self._scale()
        if name in self._captured:
            self._spare.append(self._captured.pop(name))
        buffers = self._spare.pop() if self._spare else [torch.empty_like(t) for t in self._truth()]
        for gradient, buffer in zip(gradients, buffers, strict=True):
            if gradient is None:
                buffer.zero_()
                continue
            buffer.copy_(gradient)
            if scale != 1.0:
                buffer.div_(scale)
        self._touch(gradients)
        self._captured[name] = buffers
        self._clear()

    def hold(self, name: str) -> None:
        """Let ``name`` stand for the accumulated gradient, without copying it."""
        gradients, scale = self._gradients(), self._scale()
        if scale != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.div_(scale)
        self._touch(gradients)
        self._live = name

    def _touch(self, gradients: Sequence[Tensor | None]) -> None:
        used = [gradient is not None for gradient in gradients]
        self._touched = [a or b for a, b in zip(self._touched, used, strict=True)] if self._touched else used

    # -- scalars --------------------------------------------------------------------------------

    def gram(self, names: Sequence[str], known: Gram | None = None, scales: Scales | None = None) -> Gram:
        """Inner products of the named gradients, over all shards; pairs in ``known`` are not computed again.

        The first ones are float64 throughout on the CPU, since q is a difference. Those added later only enter
        coefficients, where seven digits do and :meth:`measure` steps in if they cancel. With ``scales`` they are
        ⟨x, D⁻¹ y⟩.
        """
        products = dict(known.products) if known is not None else {}
        pairs = [
            (a, b)
            for i, a in enumerate(names)
            for b in names[: i + 1]
            if (a, b) not in products and (b, a) not in products
        ]
        needed = sorted({name for pair in pairs for name in pair})
        sums = Sums(len(pairs))
        for pieces, inverse in self._streamed(needed, scales):
            work = work_dtype(pieces[0], precise=known is None and pieces[0].device.type == "cpu")
            wide = {name: piece.to(work) for name, piece in zip(needed, pieces, strict=True)}
            if inverse is None:
                sums.add(*(inner(wide[a], wide[b]) for a, b in pairs))
            else:
                left = {name: wide[name] * inverse.to(work) for name in {a for a, _ in pairs}}
                sums.add(*(inner(left[a], wide[b]) for a, b in pairs))
        values = self._sum(sums.total()).tolist() if pairs else []
        products.update(zip(pairs, values, strict=True))
        return Gram(products, measure=lambda x, y: self.measure(x, y, scales))

    def measure(self, x: Vector, y: Vector, scales: Scales | None = None) -> float:
        """``⟨x, y⟩`` with x and y formed element by element in float64: exact where a Gram cancels."""
        names = sorted({*x, *y})
        left, right = [x[n] for n in names], [y[n] for n in names]
        sums = Sums(1)
        for pieces, inverse in self._streamed(names, scales):
            work = work_dtype(pieces[0], precise=True)
            a = combine(left, pieces, work)
            b = a if left == right else combine(right, pieces, work)
            sums.add(inner(a if inverse is None else a * inverse, b))
        return float(self._sum(sums.total())[0])

    def _streamed(
        self, names: Sequence[str], scales: Scales | None
    ) -> Iterator[tuple[tuple[Tensor, ...], Tensor | None]]:
        """Matching blocks of the named gradients, each with its piece of D⁻¹ if there is a metric.

        A parameter whose D is unknown yet is left out: δ will not move it.
        """
        groups = self._grouped(names)
        for group, scale in zip(groups, scales or [None] * len(groups), strict=True):
            if scale is not None:
                for *pieces, second in blocks(*group, scale.second):
                    yield tuple(pieces), scale.inverse(second, work_dtype(second, precise=True))
            elif scales is None:
                for found in blocks(*group):
                    yield found, None

    # -- the optimizer's metric -----------------------------------------------------------------

    def scales(self, optimizer: torch.optim.Optimizer) -> Scales | None:
        """D of the optimizer's metric, aligned with :meth:`_truth`; None before it has taken a step."""
        raise NotImplementedError

    @torch.no_grad()
    def precondition(self, vector: Vector, scales: Scales, *, into: str) -> None:
        """Capture D⁻¹ times the given combination under ``into``."""
        names = sorted(vector)
        coefficients = [vector[n] for n in names]
        buffers = self._spare.pop() if self._spare else [torch.empty_like(t) for t in self._truth()]
        for buffer, group, scale in zip(buffers, self._grouped(names), scales, strict=True):
            if scale is None:
                buffer.zero_()
                continue
            for target, second, *parts in blocks(buffer, scale.second, *group):
                work = work_dtype(target, precise=True)
                target.copy_(combine(coefficients, parts, work).mul_(scale.inverse(second, work)))
        self._captured[into] = buffers

    def displacement(self) -> float:
        if self._backup is None:
            raise PerturbedWeightsError("displacement() needs the backup of a perturbed pass in the same step.")
        sums = Sums(1)
        for w, old in zip(self._truth(), self._backup, strict=True):
            for now, before in blocks(w, old):
                work = work_dtype(now, precise=False)
                change = now.to(work) - before.to(work)
                sums.add(inner(change, change))
        return sqrt(float(self._sum(sums.total())[0]))

    # -- weights --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def perturbed(self, delta: Vector, *, precise: bool = False, seed: int = 0) -> Iterator[Realized]:
        """w+δ inside, exactly w outside.

        Restoring copies the backup: adding and subtracting δ would leave rounding error in the weights.
        """
        if self._perturbed:
            raise PerturbedWeightsError("The weights are perturbed already; perturbations do not nest.")
        truth = self._truth()
        if self._backup is None:
            self._backup = [torch.empty_like(w) for w in truth]
        self._perturbed = True
        done: list[int] = []
        try:
            realized = self._displace(delta, precise, seed, done)
            self._published()
            yield realized
        finally:
            with torch.no_grad():
                seen = self._visible()
                torch._foreach_copy_([seen[i] for i in done], [self._backup[i] for i in done])
            self._perturbed = False
            self._published()

    @torch.no_grad()
    def _displace(self, delta: Vector, precise: bool, seed: int, done: list[int]) -> Realized:
        """Back up and move the weights, tensor by tensor; ``done`` lists those with a backup."""
        names = sorted(delta)
        coefficients = [delta[n] for n in names]
        reference = "r" if "r" in self._captured else names[0]
        assert self._backup is not None
        generators: dict[torch.device, torch.Generator] = {}
        sums, missed = Sums(3), Sums(1)
        columns = zip(
            self._truth(),
            self._visible(),
            self._backup,
            self._captured[reference],
            self._grouped(names),
            strict=True,
        )
        for i, (true, w, old, ref, group) in enumerate(columns):
            old.copy_(true)
            done.append(i)
            seen = self._compute_dtype or w.dtype
            for now, before, r, *parts in blocks(w, old, ref, *group):
                work = work_dtype(before, precise)
                step = combine(coefficients, parts, work)
                if before.dtype == torch.bfloat16:  # with a float32 master, rounding to nearest does
                    if now.device not in generators:
                        generators[now.device] = torch.Generator(now.device).manual_seed(seed)
                    now.copy_(stochastic_round(step + before.to(work), now.dtype, generators[now.device]))
                elif now.dtype == before.dtype == work:
                    now.add_(step)
                else:
                    now.copy_(step + before.to(work))
                got = now.to(seen).to(work) - before.to(seen).to(work)
                sums.add(inner(step, step), inner(got, step), inner(r.to(work), got))
                miss = got.sub_(step)
                missed.add(inner(miss, miss))
        square, hit, leak, off = self._sum(torch.cat([sums.total(), missed.total()])).tolist()
        norm = sqrt(square)
        return Realized(
            norm=norm,
            fraction=hit / square if square > 0.0 else 1.0,
            distortion=sqrt(off) / norm if norm > 0.0 else 0.0,
            leak=leak,
        )

    @torch.no_grad()
    def add(self, vector: Vector, *, precise: bool = False) -> None:
        if self._perturbed:
            raise PerturbedWeightsError("The weights are perturbed: leave the perturbed pass before moving them.")
        names = [n for n in sorted(vector) if vector[n] != 0.0]
        if not names:
            return
        coefficients = [vector[n] for n in names]
        for w, group in zip(self._truth(), self._grouped(names), strict=True):
            for now, *parts in blocks(w, *group):
                work = work_dtype(now, precise)
                if work != now.dtype:
                    now.copy_(combine(coefficients, parts, work).add_(now.to(work)))
                    continue
                for c, part in zip(coefficients, parts, strict=True):
                    now.add_(part, alpha=c)
        self._committed()

    @torch.no_grad()
    def write_gradient(self, vector: Vector, *, precise: bool = False) -> None:
        if self._perturbed:
            raise PerturbedWeightsError("The weights are perturbed: leave the perturbed pass before writing gradients.")
        names = [n for n in sorted(vector) if vector[n] != 0.0]
        scale = self._scale()
        coefficients = [vector[n] * scale for n in names]
        groups = self._grouped(names) if names else [[] for _ in self._touched]
        live = names.index(self._live) if self._live in names else None
        for target, group in zip(self._targets(), groups, strict=True):
            if target is None:
                continue
            if not names:
                target.zero_()
                continue
            for grad, *parts in blocks(target, *group):
                work = work_dtype(grad, precise)
                if live is None or work != grad.dtype:
                    grad.copy_(combine(coefficients, parts, work))
                    continue
                grad.mul_(coefficients[live])  # in place: the live gradient is the target itself
                for i, part in enumerate(parts):
                    if i != live:
                        grad.add_(part, alpha=coefficients[i])
        self._live = None
        self._written()

    def _written(self) -> None:
        """The gradient has been written to :meth:`_targets`."""

    def discard_gradient(self) -> None:
        """Make the coming optimizer step one that the loss scaler skips."""
        self._clear()
        for target in self._targets():
            if target is not None and target.numel():
                target.fill_(float("inf"))
                break
        self._written()

    def hessian_product(self, closures: Sequence[Callable[[], Tensor]], vector: Vector, *, into: str) -> None:
        """Hessian-vector products need whole parameters; layouts that have them override this."""
        raise UnsupportedLayoutError(
            "jacobian: exact, no_a1 and no_a2 differentiate twice through whole parameters, which sharding takes "
            "apart: use one device or DDP, or jacobian: relaxed."
        )

    def release(self) -> None:
        """Give back the memory of the captured gradients and the backup."""
        self._captured.clear()
        self._spare.clear()
        self._backup = None

    def held_bytes(self) -> int:
        """Memory this process holds in captured gradients and backup."""
        lists = [*self._captured.values(), *self._spare, *([self._backup] if self._backup is not None else [])]
        return sum(t.numel() * t.element_size() for tensors in lists for t in tensors)

    def _grouped(self, names: Sequence[str]) -> list[list[Tensor]]:
        """For each parameter, its pieces of the named gradients (zeros where a live one has none)."""
        columns: list[list[Tensor]] = []
        for name in names:
            if name == self._live:
                live = zip(self._gradients(), self._truth(), strict=True)
                columns.append([torch.zeros_like(w) if g is None else g for g, w in live])
            else:
                columns.append(self._captured[name])
        return [list(row) for row in zip(*columns, strict=True)]
