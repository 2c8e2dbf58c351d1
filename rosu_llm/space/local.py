"""Weights that are whole on every process: one device, several devices of one process, or DDP replicas.

Under DDP the gradients arrive already averaged and identical on every rank, so every rank forms the
same scalars and the same update; nothing more is exchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from math import sqrt

import torch
from torch import Tensor, nn

from ..errors import ConfigError, PerturbedWeightsError, UnsupportedLayoutError
from ..geometry import Gram, Vector
from .blocks import Sums, blocks, combine, inner, stochastic_round, work_dtype
from .protocol import Realized


def trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that take part: trainable ones, each once however often it is tied."""
    seen: dict[int, nn.Parameter] = {id(p): p for p in parameters if p.requires_grad}
    if not seen:
        raise ConfigError(
            "No trainable parameter: every parameter handed over has requires_grad=False. "
            "Unfreeze some (p.requires_grad_(True)) or add an adapter, e.g. peft's LoraConfig."
        )
    for p in seen.values():
        if p.dtype == torch.float16:
            raise UnsupportedLayoutError(
                f"A trainable parameter of shape {tuple(p.shape)} is float16, which cannot hold the update. "
                "Load the model with dtype=torch.float32 and train with fp16=True or bf16=True (autocast)."
            )
    return list(seen.values())


class LocalSpace:
    """Parameter space over whole tensors.

    Args:
        parameters: usually the optimizer's; frozen ones are left out, tied ones counted once.
        no_sync: returns a context in which a backward pass does not synchronise replicas (DDP).
        scaler: the loss scaler of fp16 training; its factor is removed before any scalar is formed and
            put back on the gradient the optimizer will unscale.
        compute_dtype: the type the forward pass rounds weights to (autocast); theirs where not given.

    Holds up to three copies of the trainable parameters: one per captured gradient and the backup from
    which weights are restored bit for bit. They are allocated once and reused.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        no_sync: Callable[[], AbstractContextManager[object]] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.parameters = trainable(parameters)
        self._no_sync = no_sync or contextlib.nullcontext
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._compute_dtype = compute_dtype
        self._captured: dict[str, list[Tensor]] = {}
        self._spare: list[list[Tensor]] = []
        self._live: str | None = None
        self._backup: list[Tensor] | None = None
        self._touched = [False] * len(self.parameters)
        self._perturbed = False

    # -- passes ---------------------------------------------------------------------------------

    @property
    def is_perturbed(self) -> bool:
        return self._perturbed

    def begin(self) -> None:
        if self._perturbed:
            raise PerturbedWeightsError("A new step cannot begin while the weights are perturbed.")
        self._spare.extend(self._captured.values())
        self._captured.clear()
        self._live = None
        self._touched = [False] * len(self.parameters)
        self._clear()

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if last else self._no_sync()

    def backward(self, loss: Tensor) -> None:
        scaled: Tensor = loss if self._scaler is None else self._scaler.scale(loss)
        scaled.backward()

    def capture(self, name: str) -> None:
        buffers = self._spare.pop() if self._spare else [torch.empty_like(p) for p in self.parameters]
        scale = self._scale()
        for i, (p, buffer) in enumerate(zip(self.parameters, buffers, strict=True)):
            if p.grad is None:
                buffer.zero_()
                continue
            self._touched[i] = True
            buffer.copy_(p.grad)
            if scale != 1.0:
                buffer.div_(scale)
        self._captured[name] = buffers
        self._clear()

    def hold(self, name: str) -> None:
        scale = self._scale()
        for i, p in enumerate(self.parameters):
            if p.grad is None:
                continue
            self._touched[i] = True
            if scale != 1.0:
                p.grad.div_(scale)
        self._live = name

    # -- scalars --------------------------------------------------------------------------------

    def gram(self, names: Sequence[str], known: Gram | None = None) -> Gram:
        products = dict(known.products) if known is not None else {}
        pairs = [
            (a, b)
            for i, a in enumerate(names)
            for b in names[: i + 1]
            if (a, b) not in products and (b, a) not in products
        ]
        needed = sorted({name for pair in pairs for name in pair})
        sums = Sums(len(pairs))
        for group in self._grouped(needed):
            for pieces in blocks(*group):
                work = work_dtype(pieces[0].device, precise=False)
                wide = {name: piece.to(work) for name, piece in zip(needed, pieces, strict=True)}
                sums.add(*(inner(wide[a], wide[b]) for a, b in pairs))
        values = self._sum(sums.total()).tolist() if pairs else []
        products.update(zip(pairs, values, strict=True))
        return Gram(products, measure=self.measure)

    def measure(self, x: Vector, y: Vector) -> float:
        """``⟨x, y⟩`` with x and y formed element by element in float64: exact where a Gram cancels."""
        names = sorted({*x, *y})
        left, right = [x[n] for n in names], [y[n] for n in names]
        sums = Sums(1)
        for group in self._grouped(names):
            for pieces in blocks(*group):
                work = work_dtype(pieces[0].device, precise=True)
                a = combine(left, pieces, work)
                sums.add(inner(a, a if left == right else combine(right, pieces, work)))
        return float(self._sum(sums.total())[0])

    def displacement(self) -> float:
        if self._backup is None:
            raise PerturbedWeightsError("displacement() needs the backup of a perturbed pass in the same step.")
        sums = Sums(1)
        for w, old in zip(self._weights(), self._backup, strict=True):
            for now, before in blocks(w, old):
                work = work_dtype(now.device, precise=False)
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
        weights = self._weights()
        if self._backup is None:
            self._backup = [torch.empty_like(w) for w in weights]
        with torch.no_grad():
            for w, old in zip(weights, self._backup, strict=True):
                old.copy_(w)
        self._perturbed = True
        try:
            realized = self._displace(delta, precise, seed)
            self._published()
            yield realized
        finally:
            with torch.no_grad():
                for w, old in zip(weights, self._backup, strict=True):
                    w.copy_(old)
            self._perturbed = False
            self._published()

    @torch.no_grad()
    def _displace(self, delta: Vector, precise: bool, seed: int) -> Realized:
        names = sorted(delta)
        coefficients = [delta[n] for n in names]
        reference = "r" if "r" in self._captured else names[0]
        assert self._backup is not None
        generators: dict[torch.device, torch.Generator] = {}
        sums = Sums(4)
        for w, old, group, ref in zip(
            self._weights(), self._backup, self._grouped(names), self._captured[reference], strict=True
        ):
            seen = self._compute_dtype or w.dtype
            for now, before, r, *parts in blocks(w, old, ref, *group):
                work = work_dtype(now.device, precise)
                step = combine(coefficients, parts, work)
                target = step + before.to(work)
                if now.dtype == torch.bfloat16:
                    if now.device not in generators:
                        generators[now.device] = torch.Generator(now.device).manual_seed(seed)
                    now.copy_(stochastic_round(target, now.dtype, generators[now.device]))
                else:
                    now.copy_(target)
                got = now.to(seen).to(work) - before.to(seen).to(work)
                miss = got - step
                sums.add(inner(step, step), inner(got, step), inner(miss, miss), inner(r.to(work), got))
        square, hit, missed, leak = self._sum(sums.total()).tolist()
        norm = sqrt(square)
        return Realized(
            norm=norm,
            fraction=hit / square if square > 0.0 else 1.0,
            distortion=sqrt(missed) / norm if norm > 0.0 else 0.0,
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
        for w, group in zip(self._weights(), self._grouped(names), strict=True):
            for now, *parts in blocks(w, *group):
                work = work_dtype(now.device, precise)
                now.copy_(combine(coefficients, parts, work).add_(now.to(work)))
        self._published()

    @torch.no_grad()
    def write_gradient(self, vector: Vector, *, precise: bool = False) -> None:
        if self._perturbed:
            raise PerturbedWeightsError("The weights are perturbed: leave the perturbed pass before writing gradients.")
        names = [n for n in sorted(vector) if vector[n] != 0.0]
        scale = self._scale()
        coefficients = [vector[n] * scale for n in names]
        groups = self._grouped(names) if names else [[] for _ in self.parameters]
        for p, touched, group in zip(self.parameters, self._touched, groups, strict=True):
            if not touched:  # used by no pass: leave it to the optimizer as any unused parameter
                p.grad = None
                continue
            if p.grad is None:
                p.grad = torch.empty_like(p)
            if not names:
                p.grad.zero_()
                continue
            for grad, *parts in blocks(p.grad, *group):
                work = work_dtype(grad.device, precise)
                grad.copy_(combine(coefficients, parts, work))
        self._live = None

    @torch.no_grad()
    def discard_gradient(self) -> None:
        self._clear()
        for p in self.parameters:
            p.grad = torch.full_like(p, float("inf"))
            break

    def release(self) -> None:
        """Give back the memory of the captured gradients and the backup."""
        self._captured.clear()
        self._spare.clear()
        self._backup = None

    # -- what a layout may change ---------------------------------------------------------------

    def _weights(self) -> list[Tensor]:
        return [p.data for p in self.parameters]

    def _sum(self, values: Tensor) -> Tensor:
        return values

    def _published(self) -> None:
        # Inside autocast a low-precision copy of each weight may be cached: it is stale now.
        torch.clear_autocast_cache()

    def _scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _clear(self) -> None:
        for p in self.parameters:
            p.grad = None

    def _grouped(self, names: Sequence[str]) -> list[list[Tensor]]:
        """For each parameter, its pieces of the named gradients (zeros where a live one has none)."""
        columns: list[list[Tensor]] = []
        for name in names:
            if name == self._live:
                columns.append([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
            else:
                columns.append(self._captured[name])
        return [list(row) for row in zip(*columns, strict=True)]
