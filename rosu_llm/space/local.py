"""Weights that are whole on every process: one device, several devices of one process, or DDP replicas.

Under DDP the gradients arrive already averaged and identical on every rank, so every rank forms the same update. The
few scalars are the first rank's, since unlike devices would round them differently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from ..errors import ConfigError, UnsupportedLayoutError
from ..geometry import Vector
from .base import ParameterSpace
from .hessian import hessian_product, probe
from .preconditioner import Preconditioners, preconditioners_of


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


class LocalSpace(ParameterSpace):
    """Parameter space over whole tensors.

    Args:
        parameters: usually the optimizer's; frozen ones are left out, tied ones counted once.
        no_sync: returns a context in which a backward pass does not synchronise replicas (DDP).
        sync: returns one in which it does, also inside a ``no_sync`` of somebody else's.
        average: replaces a tensor by its mean over ranks, in place, for gradients that no wrapper averages.
        agree: replaces scalars by those of the first rank, so that unlike devices cannot drift apart.
        scaler: the loss scaler of fp16 training; its factor is removed before any scalar is formed and
            put back on the gradient the optimizer will unscale.
        compute_dtype: the type the forward pass rounds weights to (autocast); theirs where not given.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        no_sync: Callable[[], AbstractContextManager[object]] | None = None,
        sync: Callable[[], AbstractContextManager[object]] | None = None,
        average: Callable[[Tensor], None] | None = None,
        agree: Callable[[Tensor], Tensor] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(compute_dtype)
        self.parameters = trainable(parameters)
        self._no_sync = no_sync or contextlib.nullcontext
        self._sync = sync or contextlib.nullcontext
        self._average = average or (lambda tensor: None)
        self._agree = agree or (lambda values: values)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._probed: set[str] = set()

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        return self._sync() if last else self._no_sync()

    def backward(self, loss: Tensor) -> None:
        scaled: Tensor = loss if self._scaler is None else self._scaler.scale(loss)
        scaled.backward()

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._scaler is None:
            optimizer.step()
            return True
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        return bool(self._scaler.get_scale() >= before)

    def hessian_product(self, closures: Sequence[Callable[[], Tensor]], vector: Vector, *, into: str) -> None:
        towards = self._formed(vector)
        with self._no_sync():  # double backward goes past the hooks that would synchronise replicas
            if into not in self._probed:
                probe(closures[0], self.parameters, towards)
                self._probed.add(into)
            product = hessian_product(closures, self.parameters, towards)
        for tensor in product:
            self._average(tensor)
        self._captured[into] = product

    def _formed(self, vector: Vector) -> list[Tensor]:
        """A combination of captured gradients, as tensors."""
        names = sorted(vector)
        coefficients = [vector[n] for n in names]
        formed = []
        for w, group in zip(self._master(), self._by_parameter(names), strict=True):
            total = torch.zeros_like(w)
            for c, part in zip(coefficients, group, strict=True):
                total.add_(part.to(total.device), alpha=c)
            formed.append(total)
        return formed

    def _sum_over_shards(self, values: Tensor) -> Tensor:
        return self._agree(values)

    def _loss_scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def preconditioners(self, optimizer: torch.optim.Optimizer) -> Preconditioners | None:
        return preconditioners_of(optimizer, self.parameters)

    def owners(self) -> list[nn.Parameter | None]:
        return list(self.parameters)

    def _master(self) -> list[Tensor]:
        return [p.data for p in self.parameters]

    def _gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.parameters]

    def _clear_gradients(self) -> None:
        for p in self.parameters:
            p.grad = None

    def _gradient_targets(self) -> list[Tensor | None]:
        for p, touched in zip(self.parameters, self._used, strict=True):
            if not touched:  # used by no pass: leave it to the optimizer as any unused parameter
                p.grad = None
            elif p.grad is None:
                p.grad = torch.zeros_like(p)
        return [p.grad for p in self.parameters]


class ReplicaSpace(LocalSpace):
    """Whole tensors on every process, gradients averaged by this space.

    Args:
        parameters: the trained ones, in the same order on every rank.
        average: replaces a tensor by its mean over ranks, in place.
        agree, scaler, compute_dtype: as for :class:`LocalSpace`.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        average: Callable[[Tensor], None],
        agree: Callable[[Tensor], Tensor] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(parameters, average=average, agree=agree, scaler=scaler, compute_dtype=compute_dtype)

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        yield
        if last:
            for p in self.parameters:
                if p.grad is None:  # every rank must join the collective
                    p.grad = torch.zeros_like(p)
                self._average(p.grad)
