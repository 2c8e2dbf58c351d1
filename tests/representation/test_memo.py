"""What the first trained layer need not compute again, in layers built to mislead."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rosu_llm.representation.activations import FastActivations, PlainActivations
from tests.models import tiny_decoder
from tests.representation.test_activations import batch

WIDTH = 6


class Inner(nn.Module):
    """Ends in the matrix that is trained, or goes on after it."""

    def __init__(self, on: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.on = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), on

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return torch.sin(y) if self.on else y


class Layer(nn.Module):
    def __init__(self, rule: Callable[[Any, Tensor], Tensor], inner: nn.Module) -> None:
        super().__init__()
        self.rule, self.inner = rule, inner
        self.before, self.after, self.shared = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor, *, position: int) -> Tensor:
        return self.rule(self, hidden)


RULES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Any, str]] = {
    "usual": (lambda m, x: x + m.after(m.inner(torch.tanh(m.before(x)))), Inner(), "inner.down.weight"),
    "goes on": (lambda m, x: x + m.after(m.inner(torch.tanh(m.before(x)))), Inner(True), "inner.down.weight"),
    "shared before and after": (
        lambda m, x: x + m.shared(m.inner(torch.tanh(m.shared(x)))), Inner(), "inner.down.weight",
    ),
    "twice before": (lambda m, x: m.inner(m.before(torch.tanh(m.before(x)))), Inner(), "inner.down.weight"),
    "trained twice": (lambda m, x: m.inner(torch.tanh(m.inner(m.before(x)))), Inner(), "inner.down.weight"),
    "trained first": (lambda m, x: m.after(m.inner(torch.tanh(m.before(x)))), Inner(), "before.weight"),
    "trained child": (lambda m, x: m.after(torch.tanh(m.before(x))), nn.Identity(), "after.bias"),
    "the layer's own": (lambda m, x: m.after(torch.tanh(m.before(x * m.scale))), nn.Identity(), "scale"),
    "passes through": (
        lambda m, x: x + m.inner(m.before(x)), nn.Sequential(Inner(), nn.Identity()), "inner.0.down.weight",
    ),
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(3))

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, position=0)  # by name, as transformers does
        return SimpleNamespace(hidden=hidden)


@pytest.mark.parametrize(("rule", "inner", "trained"), RULES.values(), ids=list(RULES))
def test_replayed_layers_compute_the_same(rule: Any, inner: nn.Module, trained: str) -> None:
    import copy

    torch.manual_seed(0)
    model = Model(lambda: Layer(rule, copy.deepcopy(inner)))
    model.requires_grad_(False)
    named = dict(model.named_parameters())
    names = [f"layers.{i}.{trained}" for i in (1, 2)]
    initial = {name: named[name].detach().clone() for name in names}
    theta = [named[name].requires_grad_() for name in names]
    fast, plain = FastActivations(model, model.layers, 1, 2, initial), PlainActivations(model, "layers", 2)
    given = {"input_ids": batch("right")["input_ids"]}
    with torch.no_grad():
        for p in theta:
            p.add_(0.3 * torch.randn_like(p))
    remembered, truth = fast.prepare(given), plain.prepare(given)
    assert torch.equal(remembered.reference, truth.reference)
    for _ in range(2):
        mine, its = fast.current(remembered), plain.current(truth)
        assert torch.equal(mine, its)
        probe = torch.randn_like(its)
        for a, b in zip(
            torch.autograd.grad((mine * probe).sum(), theta),
            torch.autograd.grad((its * probe).sum(), theta),
            strict=True,
        ):
            assert torch.equal(a, b)
        with torch.no_grad():
            for p in theta:
                p.mul_(1.5)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_attention_of_the_first_trained_layer_runs_once() -> None:
    """The point of it: only what follows the trained matrix is computed again."""
    model = tiny_decoder()
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in (1, 2)]
    named = dict(model.named_parameters())
    fast = FastActivations(model, model.model.layers, 1, 2, {name: named[name].detach().clone() for name in names})
    calls = {"q_proj": 0, "up_proj": 0, "down_proj": 0}
    layer = model.model.layers[1]
    for module in (layer.self_attn.q_proj, layer.mlp.up_proj, layer.mlp.down_proj):
        name = next(n for n in calls if module in (getattr(layer.self_attn, n, None), getattr(layer.mlp, n, None)))
        module.register_forward_hook(lambda *_, name=name: calls.__setitem__(name, calls[name] + 1))
    prepared = fast.prepare(batch("right"))
    fast.current(prepared)
    fast.current(prepared)
    assert calls == {"q_proj": 1, "up_proj": 1, "down_proj": 3}
