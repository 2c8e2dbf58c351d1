"""jacobian: exact, no_a1, no_a2 against autograd through the whole map, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rosu_llm import UnlearningStep
from rosu_llm.errors import UnsupportedLayoutError
from rosu_llm.geometry import F, build_rule
from rosu_llm.losses import COUNT, logits_of, token_nll
from rosu_llm.space import LocalSpace, ParameterSpace
from rosu_llm.step import StepEngine
from tests.models import CleanLM, flat, samples, tiny_llama

RHO = 0.3
Loss = Callable[[Tensor], Tensor]


class Problem(nn.Module):
    """Two smooth losses of one vector, in two parameters, with Hessians that are not multiples of the identity."""

    def __init__(self, seed: int = 0, size: int = 12) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.a, self.b, self.ya, self.yb = draw(20, size), draw(20, size), draw(20), draw(20)
        start = draw(size)
        self.one, self.two = nn.Parameter(start[:5].clone()), nn.Parameter(start[5:].clone())

    @property
    def w(self) -> Tensor:
        return torch.cat([self.one, self.two])

    def forget(self, w: Tensor) -> Tensor:
        return (torch.tanh(self.a @ w) - self.ya).square().mean()

    def retain(self, w: Tensor) -> Tensor:
        return (torch.tanh(self.b @ w) - self.yb).square().mean()


def gradient(loss: Loss, w: Tensor, graph: bool = False) -> Tensor:
    return torch.autograd.grad(loss(w), w, create_graph=graph)[0]


def through_the_map(p: Problem, tau: float, *, hessian: bool = True, projector: bool = True) -> Tensor:
    """∇_w L_r(w + δ(w)) by autograd; f's or the projector's dependence on w can be replaced as A2 and A1 say."""
    w = p.w.detach().requires_grad_()
    f = gradient(p.forget, w, graph=True)
    if not hessian:  # H_f = I: f moves as w does
        f = f.detach() + (w - w.detach())
    r = gradient(p.retain, w, graph=projector)
    if projector:
        q = f - (f @ r) / (r @ r + tau) * r
    else:  # P_r frozen
        q = f - (f @ r.detach()) / (r.detach() @ r.detach() + tau) * r.detach()
    return _total(p, w, q)


def _total(p: Problem, w: Tensor, q: Tensor) -> Tensor:
    return torch.autograd.grad(p.retain(w + RHO * q / q.norm()), w)[0]


def engine_gradient(p: Problem, jacobian: str, **options: float) -> Tensor:
    rule = build_rule("rosu", jacobian=jacobian, **options)
    space = LocalSpace(p.parameters())
    engine = StepEngine(rule, space, module=p)
    engine.run({"forget": [lambda: p.forget(p.w)], "retain": [lambda: p.retain(p.w)]}, rho=RHO)
    return torch.cat([q.grad for q in p.parameters() if q.grad is not None])


@pytest.mark.parametrize("tau", [0.0, 1e-8, 0.05])
@pytest.mark.parametrize("seed", range(4))
def test_exact_is_the_gradient_of_the_whole_map(seed: int, tau: float) -> None:
    """Also for a τ that matters: it is differentiated, not ignored."""
    p = Problem(seed)
    expected = through_the_map(p, tau)
    got = engine_gradient(p, "exact", tau=tau)
    assert float((got - expected).norm() / expected.norm()) < 1e-8


@pytest.mark.parametrize("seed", range(4))
def test_relative_tau_is_differentiated_too(seed: int) -> None:
    p, share = Problem(seed), 0.25
    w = p.w.detach().requires_grad_()
    f, r = gradient(p.forget, w, graph=True), gradient(p.retain, w, graph=True)
    q = f - (f @ r) / ((1.0 + share) * (r @ r)) * r
    expected = _total(p, w, q)
    rule = build_rule("rosu", jacobian="exact", tau=share, tau_mode="relative")
    StepEngine(rule, LocalSpace(p.parameters()), module=p).run(
        {"forget": [lambda: p.forget(p.w)], "retain": [lambda: p.retain(p.w)]}, rho=RHO
    )
    got = torch.cat([q.grad for q in p.parameters() if q.grad is not None])
    assert float((got - expected).norm() / expected.norm()) < 1e-8


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("jacobian", "keeps"), [("no_a1", {"hessian": False}), ("no_a2", {"projector": False})], ids=["no_a1", "no_a2"]
)
def test_each_half_is_the_gradient_of_the_map_with_the_other_assumption(
    jacobian: str, keeps: dict[str, bool], seed: int
) -> None:
    """no_a1 keeps the projector's differential and has H_f = I; no_a2 the other way round."""
    p = Problem(seed)
    expected = through_the_map(p, 0.0, **keeps)
    got = engine_gradient(p, jacobian, tau=0.0)
    assert float((got - expected).norm() / expected.norm()) < 1e-8


@pytest.mark.parametrize("seed", range(4))
def test_relaxed_is_the_map_with_both_assumptions(seed: int) -> None:
    p = Problem(seed)
    expected = through_the_map(p, 0.0, hessian=False, projector=False)
    got = engine_gradient(p, "relaxed", tau=0.0)
    assert float((got - expected).norm() / expected.norm()) < 1e-8


def test_the_modes_differ() -> None:
    """Else the tests above would show nothing."""
    results = [engine_gradient(Problem(0), mode) for mode in ("relaxed", "none", "exact", "no_a1", "no_a2")]
    for i, one in enumerate(results):
        for other in results[:i]:
            assert float((one - other).norm() / one.norm()) > 1e-3


def language_problem(model: nn.Module, micro: int) -> dict[str, list[Callable[[], Tensor]]]:
    from rosu_llm import ForgetRetainCollator

    collate = ForgetRetainCollator(0)
    window: dict[str, list[Callable[[], Tensor]]] = {}
    for part, seed in (("forget", 1), ("retain", 2)):
        rows = samples(4, seed)
        batches = [collate(rows[i :: 4 // micro]) for i in range(4 // micro)]
        count = sum(float(COUNT["token"](b)) for b in batches)
        window[part] = [
            lambda b=b, count=count: token_nll(logits_of(model, b), b["labels"]).sum() / count  # type: ignore[misc]
            for b in batches
        ]
    return window


def test_micro_batches_add_up() -> None:
    """4×1 equals 1×4 to rounding in float64."""
    found = []
    for micro in (1, 4):
        model = CleanLM().double()
        StepEngine(build_rule("rosu", jacobian="exact"), LocalSpace(model.parameters()), module=model).run(
            language_problem(model, micro), rho=RHO
        )
        found.append(flat([p.grad for p in model.parameters()]))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-12


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_llama_can_be_differentiated_twice(attention: str) -> None:
    """H x against central differences of the gradient; fused attention is replaced by matrix products meanwhile."""
    model = tiny_llama(attn_implementation=attention)
    space = LocalSpace(model.parameters())
    window = language_problem(model, 4)
    engine = StepEngine(build_rule("rosu", jacobian="exact"), space, module=model)
    engine.run(window, rho=0.05)
    direction = [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(space.parameters)
    ]
    from rosu_llm.space.hessian import hessian_product

    product = hessian_product(window["retain"], space.parameters, direction)

    def at(step: float) -> Tensor:
        with torch.no_grad():
            for p, d in zip(space.parameters, direction, strict=True):
                p.add_(d, alpha=step)
        result = flat(torch.autograd.grad(sum(c() for c in window["retain"]), space.parameters))
        with torch.no_grad():
            for p, d in zip(space.parameters, direction, strict=True):
                p.sub_(d, alpha=step)
        return result

    width = 2e-4
    expected = (at(width) - at(-width)) / (2 * width)
    # Float32 gradients over 2·width leave about 1e-3; central differences are wrong by width²‖d‖², with ‖d‖ ≈ 100.
    assert float((flat(product) - expected).norm() / expected.norm()) < 5e-3


def test_sharded_layouts_refuse() -> None:
    with pytest.raises(UnsupportedLayoutError, match="use one device or DDP, or jacobian: relaxed"):
        ParameterSpace.hessian_product(object(), [], F, into="hf")  # type: ignore[arg-type]


def test_kernels_without_a_second_derivative_are_named() -> None:
    """A fused attention that insists on itself; the weights stay as they were."""
    p = nn.Parameter(torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0)))
    before = p.detach().clone()

    def attend(sharpness: float) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(sharpness * p, p, p)
        return (out**3).sum()

    step = UnlearningStep(nn.ParameterList([p]), torch.optim.SGD([p], lr=0.1), jacobian="exact", amplify="direct")
    with pytest.raises(UnsupportedLayoutError, match="attn_implementation='eager'"):
        step(lambda: attend(1.0), lambda: attend(2.0))
    assert torch.equal(p.detach(), before)
