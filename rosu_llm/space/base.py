"""The vector algebra of a parameter space, over lists of local tensors.

A layout says which tensors a process owns (`_master`: what the optimizer updates; `_forward_weights`: what the next
forward reads), where a finished gradient lies, how scalars are summed over processes, and what must happen after
weights were edited. Everything else is written once, here.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import sqrt

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError, PerturbedWeightsError, UnsupportedLayoutError
from ..geometry import Gram, Vector
from ..geometry.slots import RETAIN
from .blocks import Sums, blocks, combine, inner, sampled, stochastic_round, work_dtype
from .preconditioner import Preconditioners


class Realized:
    """What became of a perturbation once weights were rounded to the type the model computes in.

    Args:
        sums: ‖δ‖² and ⟨r, δ⟩; then, over the blocks whose rounding was measured, ‖δ‖², ⟨ε, δ⟩, ⟨r, ε⟩ and ‖ε‖², where
            ε = realised − δ. They stay on their device: whoever asks first waits, unless :meth:`tell` has told them.
    """

    def __init__(self, sums: Tensor) -> None:
        self.sums = sums
        self._values: Sequence[float] | None = None

    def tell(self, values: Sequence[float]) -> None:
        """The sums, for those who have read them together with something else."""
        self._values = values

    def _value(self, i: int) -> float:
        if self._values is None:
            self._values = self.sums.tolist()
        return self._values[i]

    @property
    def norm(self) -> float:
        """‖δ‖ as intended."""
        return sqrt(self._value(0))

    @property
    def fraction(self) -> float:
        """⟨realised, δ⟩/‖δ‖²; 1 when all of δ arrived."""
        return 1.0 + self._value(3) / self._value(2) if self._value(2) > 0.0 else 1.0

    @property
    def leak(self) -> float:
        """⟨r, realised⟩, the first-order change of the retain loss."""
        return self._value(1) + self._value(4)

    @property
    def distortion(self) -> float:
        """‖realised − δ‖/‖δ‖; 0 when nothing else did."""
        return sqrt(self._value(5) / self._value(2)) if self._value(2) > 0.0 else 0.0


class ParameterSpace(ABC):
    """Capture, inner products, exact perturb and restore over local tensors.

    Holds one copy of the trainable parameters this process owns per captured gradient (two for most methods), and
    the backup from which weights are restored bit for bit. They are allocated once and reused.

    Args:
        compute_dtype: the type the forward pass rounds weights to (autocast); theirs where not given.
    """

    def __init__(self, compute_dtype: torch.dtype | None = None) -> None:
        self._compute_dtype = compute_dtype
        #: The type captured gradients are kept in, in place of the weights'.
        self.capture_dtype: torch.dtype | None = None
        #: Whether they and the backup lie in host memory, from where they come back block by block.
        self.capture_on_host = False
        self._captured: dict[str, list[Tensor]] = {}
        self._spare: list[list[Tensor]] = []
        #: Captured gradients that outlive a step.
        self.memory: dict[str, list[Tensor]] = {}
        self._held: str | None = None
        self._backup: list[Tensor] | None = None
        #: Whether :meth:`displacement` will be asked how far the optimizer went.
        self.measures_steps = True
        self._used: list[bool] = []
        self._perturbed = False
        self._stale = False  # whether an error left copies of other processes' weights perturbed

    # -- what a layout provides -----------------------------------------------------------------

    @abstractmethod
    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of one micro-batch."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of ``loss``."""

    @abstractmethod
    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Let the optimizer step on the gradient written; False if it was skipped."""

    @abstractmethod
    def _master(self) -> list[Tensor]:
        """The weights the optimizer updates, as this process owns them."""

    @abstractmethod
    def owners(self) -> list[nn.Parameter | None]:
        """The parameter each tensor of :meth:`_master` is a piece of; None for padding."""

    @abstractmethod
    def _gradients(self) -> list[Tensor | None]:
        """The accumulated gradient, aligned with :meth:`_master`; None where a parameter took no part."""

    @abstractmethod
    def _clear_gradients(self) -> None:
        """Drop the accumulated gradient."""

    @abstractmethod
    def _gradient_targets(self) -> list[Tensor | None]:
        """Tensors to write the optimizer's gradient into; None for parameters no pass has used."""

    #: Whether the weights the forward reads are a rounded copy of :meth:`_master`.
    keeps_master = False

    def _forward_weights(self) -> list[Tensor]:
        """The weights the next forward reads; those of :meth:`_master` unless a layout keeps a master copy."""
        return self._master()

    def _loss_scale(self) -> float:
        """The loss scale that gradients currently carry."""
        return 1.0

    def _sum_over_shards(self, values: Tensor) -> Tensor:
        """Sum over the processes among which the parameters are sharded."""
        return values

    def _forward_weights_changed(self) -> None:
        """The visible weights were edited."""
        # Inside autocast a low-precision copy of each weight may be cached: it is stale now.
        torch.clear_autocast_cache()

    def _master_changed(self) -> None:
        """The true weights were edited, outside the optimizer."""
        self._forward_weights_changed()

    # -- passes ---------------------------------------------------------------------------------

    @property
    def is_perturbed(self) -> bool:
        """Whether the weights currently carry a perturbation."""
        return self._perturbed

    def begin(self) -> None:
        """Forget the previous step's gradients and clear the accumulated one."""
        if self._perturbed:
            raise PerturbedWeightsError("A new step cannot begin while the weights are perturbed.")
        if self._stale:
            self._forward_weights_changed()
            self._stale = False
        self.abandon()

    def abandon(self) -> None:
        """The same after an error, when other processes may be elsewhere: nothing they would have to join."""
        self._spare.extend(buffers for name, buffers in self._captured.items() if name not in self.memory)
        self._captured.clear()
        self._held = None
        self._used = []
        self._clear_gradients()

    def capture(self, name: str) -> None:
        """Store the accumulated gradient under ``name``, in place of an earlier one, and clear it."""
        gradients, loss_scale = self._gradients(), self._loss_scale()
        if name in self._captured:
            self._spare.append(self._captured.pop(name))
        buffers = self._buffers()
        for gradient, buffer in zip(gradients, buffers, strict=True):
            if gradient is None:
                buffer.zero_()
            else:
                buffer.copy_(gradient if loss_scale == 1.0 else gradient / loss_scale)
        self._mark_used(gradients)
        self._captured[name] = buffers
        self._clear_gradients()

    def _buffers(self) -> list[Tensor]:
        """Room for one captured gradient."""
        if self._spare:
            return self._spare.pop()
        return [self._room(t, self.capture_dtype or t.dtype) for t in self._master()]

    def _room(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.capture_on_host or like.device.type == "cpu":
            return torch.empty_like(like, dtype=dtype)
        return torch.empty(like.shape, dtype=dtype, pin_memory=like.device.type == "cuda")

    @torch.no_grad()
    def remember(self, name: str, source: str, keep: float) -> None:
        """Let ``name`` be ``keep`` times what it was in the step before plus the rest of ``source``, over all steps."""
        if name not in self.memory:
            # an average moves by less than a bf16 can hold
            captured = zip(self._captured[source], self._master(), strict=True)
            self.memory[name] = [t.to(w.dtype, copy=True) for t, w in captured]
        else:
            for old, new in zip(self.memory[name], self._captured[source], strict=True):
                old.mul_(keep).add_(new, alpha=1.0 - keep)
        self._captured[name] = self.memory[name]

    def store(self, name: str) -> None:
        """Capture the accumulated gradient under ``name`` for all steps to come, in place of an earlier one."""
        if name in self.memory:
            self._captured[name] = self.memory[name]  # its tensors are used again
        self.capture(name)
        self.memory[name] = self._captured[name]

    def recall(self) -> list[str]:
        """Let everything in memory take part in this step; returns the names."""
        self._captured.update(self.memory)
        return list(self.memory)

    def hold(self, name: str) -> None:
        """Let ``name`` stand for the accumulated gradient, without copying it."""
        gradients, loss_scale = self._gradients(), self._loss_scale()
        if loss_scale != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.div_(loss_scale)
        self._mark_used(gradients)
        self._held = name

    def _mark_used(self, gradients: Sequence[Tensor | None]) -> None:
        used = [gradient is not None for gradient in gradients]
        self._used = [a or b for a, b in zip(self._used, used, strict=True)] if self._used else used

    # -- scalars --------------------------------------------------------------------------------

    def gram(
        self, names: Sequence[str], known: Gram | None = None, preconditioners: Preconditioners | None = None
    ) -> Gram:
        """Inner products of the named gradients, over all shards; pairs in ``known`` are not computed again.

        Those of the first call are float64 throughout on the CPU, since q is a difference. Those added later only enter
        coefficients: float32 suffices there, and :meth:`measure` recomputes any product that cancels. With
        ``preconditioners`` they are ⟨x, D⁻¹ y⟩.
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
        for pieces, inverse in self._streamed(needed, preconditioners):
            work = work_dtype(pieces[0], precise=known is None and pieces[0].device.type == "cpu")
            wide = {name: piece.to(work) for name, piece in zip(needed, pieces, strict=True)}
            left = wide
            if inverse is not None:
                scale = inverse(work)
                left = {name: wide[name] * scale for name in {a for a, _ in pairs}}
            sums.add(*(inner(left[a], wide[b]) for a, b in pairs))
        values = self._sum_over_shards(sums.total()).tolist() if pairs else []
        products.update(zip(pairs, values, strict=True))
        return Gram(products, measure=lambda x, y: self.measure(x, y, preconditioners))

    def measure(self, x: Vector, y: Vector, preconditioners: Preconditioners | None = None) -> float:
        """``⟨x, y⟩`` with x and y formed element by element in float64: exact where a Gram cancels."""
        names = sorted({*x, *y})
        left, right = [x[n] for n in names], [y[n] for n in names]
        sums = Sums(1)
        for pieces, inverse in self._streamed(names, preconditioners):
            work = work_dtype(pieces[0], precise=True)
            a = combine(left, pieces, work)
            b = a if left == right else combine(right, pieces, work)
            sums.add(inner(a if inverse is None else a * inverse(work), b))
        return float(self._sum_over_shards(sums.total())[0])

    def _streamed(
        self, names: Sequence[str], preconditioners: Preconditioners | None
    ) -> Iterator[tuple[tuple[Tensor, ...], Callable[[torch.dtype], Tensor] | None]]:
        """Matching blocks of the named gradients, each with its piece of D⁻¹, in a type to be asked for, in a metric.

        A parameter whose D is unknown yet is left out: δ will not move it.
        """
        groups = self._by_parameter(names)
        each = zip(self._master(), groups, preconditioners or [None] * len(groups), strict=True)
        for w, group, preconditioner in each:  # w is where the others come to
            if preconditioner is not None:
                for _, *pieces, second in blocks(w, *group, preconditioner.second):
                    yield tuple(pieces), partial(preconditioner.inverse, second)
            elif preconditioners is None:
                for _, *pieces in blocks(w, *group):
                    yield tuple(pieces), None

    # -- the optimizer's metric -----------------------------------------------------------------

    @abstractmethod
    def preconditioners(self, optimizer: torch.optim.Optimizer) -> Preconditioners | None:
        """D of the optimizer's metric, aligned with :meth:`_master`; None before it has taken a step."""

    @torch.no_grad()
    def precondition(
        self, vector: Vector, preconditioners: Preconditioners, *, into: str, precise: bool = True
    ) -> None:
        """Capture D⁻¹ times the given combination under ``into``; on the CPU it is always formed in float64."""
        names = sorted(vector)
        coefficients = [vector[n] for n in names]
        buffers = self._buffers()
        for buffer, group, preconditioner in zip(buffers, self._by_parameter(names), preconditioners, strict=True):
            if preconditioner is None:
                buffer.zero_()
                continue
            for target, second, *parts in blocks(buffer, preconditioner.second, *group):
                work = work_dtype(target, precise or target.device.type == "cpu")
                target.copy_(combine(coefficients, parts, work).mul_(preconditioner.inverse(second, work)))
        self._captured[into] = buffers

    def displacement(self) -> float:
        """‖w_now − w_before‖ since the perturbation's backup was taken."""
        if self._backup is None:
            raise PerturbedWeightsError("displacement() needs the backup of a perturbed pass in the same step.")
        sums = Sums(1)
        for w, old in zip(self._master(), self._backup, strict=True):
            for now, before in blocks(w, old):
                work = work_dtype(now, precise=False)
                change = now.to(work) - before.to(work)
                sums.add(inner(change, change))
        return sqrt(float(self._sum_over_shards(sums.total())[0]))

    def weights(self) -> list[Tensor]:
        """The weights the optimizer updates, as this process owns them, to be copied from or into."""
        return self._master()

    def weights_changed(self) -> None:
        """To be called after something was copied into :meth:`weights`."""
        self._master_changed()

    def weight_norm(self) -> float:
        """‖w‖."""
        sums = Sums(1)
        for w in self._master():
            for (block,) in blocks(w):
                wide = block.to(work_dtype(block, precise=False))
                sums.add(inner(wide, wide))
        return sqrt(float(self._sum_over_shards(sums.total())[0]))

    # -- weights --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def perturbed(self, delta: Vector, *, precise: bool = False, seed: int = 0) -> Iterator[Realized]:
        """w+δ inside, exactly w outside.

        Restoring copies the backup: adding and subtracting δ would leave rounding error in the weights. A master copy
        of the weights is backup enough, unless it has to be told later how far the optimizer moved it.
        """
        if self._perturbed:
            raise PerturbedWeightsError("The weights are perturbed already; perturbations do not nest.")
        if self._backup is None and not self._master_restores:
            self._backup = [self._room(w, w.dtype) for w in self._master()]
        self._perturbed = True
        done: list[int] = []
        try:
            realized = self._displace(delta, precise, seed, done)
            self._forward_weights_changed()
            yield realized
        except NonFiniteError:  # told from a sum over all processes: every one of them is here
            self._restore(done)
            self._forward_weights_changed()
            raise
        except BaseException:
            # The others may be in the middle of their pass: nothing that they would have to join.
            self._restore(done)
            self._stale = True
            raise
        else:
            self._restore(done)
            self._forward_weights_changed()

    @property
    def _master_restores(self) -> bool:
        return self.keeps_master and not self.measures_steps

    @torch.no_grad()
    def _restore(self, done: Sequence[int]) -> None:
        """This process's own weights from the backup, bit for bit."""
        seen, backup = self._forward_weights(), self._master() if self._backup is None else self._backup
        torch._foreach_copy_([seen[i] for i in done], [backup[i] for i in done])
        self._perturbed = False

    @torch.no_grad()
    def _displace(self, delta: Vector, precise: bool, seed: int, done: list[int]) -> Realized:
        """Back up and move the weights, tensor by tensor; ``done`` lists those with a backup."""
        names = sorted(delta)
        coefficients = [delta[n] for n in names]
        reference = RETAIN if RETAIN in self._captured else names[0]
        truth = self._master()
        generators: dict[torch.device, torch.Generator] = {}
        intended, rounding = Sums(2), Sums(4)
        columns = zip(
            truth,
            self._forward_weights(),
            truth if self._backup is None else self._backup,
            self._captured[reference],
            self._by_parameter(names),
            strict=True,
        )
        for i, (true, w, old, ref, group) in enumerate(columns):
            if old is not true:
                old.copy_(true)
            done.append(i)
            seen, (measured, weight) = self._compute_dtype or w.dtype, sampled(w)
            for j, (now, before, r, *parts) in enumerate(blocks(w, old, ref, *group)):
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
                square, wide = inner(step, step), r.to(work)
                intended.add(square, inner(wide, step))
                if j % measured == 0:
                    miss = (now.to(seen).to(work) - before.to(seen).to(work)).sub_(step)
                    found = square, inner(miss, step), inner(wide, miss), inner(miss, miss)
                    rounding.add(*(found if weight == 1.0 else (weight * value for value in found)))
        return Realized(self._sum_over_shards(torch.cat([intended.total(), rounding.total()])))

    @torch.no_grad()
    def add(self, vector: Vector, *, precise: bool = False) -> None:
        if self._perturbed:
            raise PerturbedWeightsError("The weights are perturbed: leave the perturbed pass before moving them.")
        names = [n for n in sorted(vector) if vector[n] != 0.0]
        if not names:
            return
        coefficients = [vector[n] for n in names]
        for w, group in zip(self._master(), self._by_parameter(names), strict=True):
            for now, *parts in blocks(w, *group):
                work = work_dtype(now, precise)
                if work != now.dtype:
                    now.copy_(combine(coefficients, parts, work).add_(now.to(work)))
                    continue
                for c, part in zip(coefficients, parts, strict=True):
                    now.add_(part, alpha=c)
        self._master_changed()

    @torch.no_grad()
    def write_gradient(self, vector: Vector, *, precise: bool = False) -> None:
        if self._perturbed:
            raise PerturbedWeightsError("The weights are perturbed: leave the perturbed pass before writing gradients.")
        names = [n for n in sorted(vector) if vector[n] != 0.0]
        loss_scale = self._loss_scale()
        coefficients = [vector[n] * loss_scale for n in names]
        groups = self._by_parameter(names) if names else [[] for _ in self._used]
        live = names.index(self._held) if self._held in names else None
        for target, group in zip(self._gradient_targets(), groups, strict=True):
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
        self._held = None
        self._gradient_written()

    def _gradient_written(self) -> None:
        """The gradient has been written to :meth:`_gradient_targets`."""
        return

    def discard_gradient(self) -> None:
        """Make the coming optimizer step one that the loss scaler skips."""
        self._clear_gradients()
        for target in self._gradient_targets():
            if target is not None and target.numel():
                target.fill_(float("inf"))
                break
        self._gradient_written()

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
        self.memory.clear()
        self._backup = None

    def held_bytes(self) -> int:
        """Memory this process holds in captured gradients and backup."""
        lists = [
            *{**self.memory, **self._captured}.values(),
            *self._spare,
            *([self._backup] if self._backup is not None else []),
        ]
        return sum(t.numel() * t.element_size() for tensors in lists for t in tensors)

    def _by_parameter(self, names: Sequence[str]) -> list[list[Tensor]]:
        """For each parameter, its pieces of the named gradients (zeros where a live one has none)."""
        columns: list[list[Tensor]] = []
        for name in names:
            if name == self._held:
                live = zip(self._gradients(), self._master(), strict=True)
                columns.append([torch.zeros_like(w) if g is None else g for g, w in live])
            else:
                columns.append(self._captured[name])
        return [list(row) for row in zip(*columns, strict=True)]
