"""What the simulated accelerator must refuse, must do and must count; run on it, read by test_device.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rosu_llm.space.hessian import _same_random_numbers
from tests.accelerator import device
from tests.accelerator.device import NAME
from tests.accelerator.recorder import record


def refused() -> dict[str, str]:
    """What CUDA refuses: the error of each, or nothing where there was none."""
    x = torch.arange(6.0, device=NAME).reshape(2, 3)
    actions: dict[str, Callable[[], Any]] = {
        "sum of two devices": lambda: x + torch.ones(3),
        "product": lambda: x @ torch.ones(3, 3),
        "cat": lambda: torch.cat([x, torch.ones(2, 3)]),
        "stack of a CPU scalar": lambda: torch.stack([x.sum(), torch.tensor(1.0)]),
        "device index into a CPU tensor": lambda: torch.ones(9)[x.long()],
        "CPU generator": lambda: torch.rand(3, device=NAME, generator=torch.Generator()),
        "two accelerators": lambda: x + torch.ones(3, device=f"{NAME}:1"),
        "numpy": lambda: x.numpy(),
        "a module on the CPU": lambda: nn.Linear(3, 4)(x),
        "more memory than there is": more_than_there_is,
    }
    return {name: error_of(action) for name, action in actions.items()}


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except (RuntimeError, IndexError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def more_than_there_is() -> None:
    device.limit(1000)
    try:
        torch.zeros(100, device=NAME)  # fits
        torch.zeros(1000, device=NAME)
    finally:
        device.limit(None)


def allowed() -> dict[str, bool]:
    """What must work as on any device."""
    x = torch.arange(6.0, device=NAME).reshape(2, 3)
    y = x.clone()
    y.view(-1)[2:4].mul_(10.0)
    here, there = nn.Linear(3, 4), nn.Linear(3, 4).to(NAME)
    there.load_state_dict(here.state_dict())
    for layer, value in ((here, x.cpu()), (there, x)):
        layer(value).square().sum().backward()
    assert here.weight.grad is not None and there.weight.grad is not None
    drop, ones = nn.Dropout(0.5), torch.ones(64, device=NAME)
    with _same_random_numbers([there.weight]) as replay:
        first = drop(ones)
        replay()
        again = drop(ones)
    with torch.autocast(NAME, dtype=torch.bfloat16):
        types = there(x).dtype == torch.bfloat16, there(x).softmax(-1).dtype == torch.float32
    return {
        "a zero-dimensional CPU tensor takes part": (x + torch.tensor(1.0)).sum().item() == 21.0,
        "views share memory": y.cpu().tolist() == [[0.0, 1.0, 20.0], [30.0, 4.0, 5.0]],
        "gradients are the CPU's": torch.equal(here.weight.grad, there.weight.grad.cpu()),
        "autocast knows CUDA's lists": all(types),
        "masks are drawn again": torch.equal(first, again) and torch.equal(first, drop(ones)),
        "other masks without": not torch.equal(drop(ones), drop(ones)),
    }


def counted() -> dict[str, list[int]]:
    """How many events and how many bytes of some operations, by kind."""
    x = torch.arange(6.0, device=NAME)
    actions: dict[str, tuple[str, Callable[[], Any]]] = {
        "bool": ("sync", lambda: bool((x > 0).any())),
        "item": ("sync", lambda: x.sum().item()),
        "cpu": ("sync", lambda: x.cpu()),
        "mask": ("sync", lambda: x[x > 2]),
        "arithmetic": ("sync", lambda: (x * 2 + 1).sum()),
        "to the device": ("h2d", lambda: torch.ones(4).to(NAME)),
        "double": ("float64", lambda: x.double()),
        "sum in double": ("float64", lambda: x.sum(dtype=torch.float64)),
        "sum": ("float64", lambda: x.sum()),
        "product": ("made", lambda: x * x),
    }
    found = {}
    for name, (kind, action) in actions.items():
        with record() as events:
            action()
        found[name] = [events.total(kind), events.volume(kind)]
    return found
