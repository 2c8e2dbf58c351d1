"""``metric: adam``: δ against a naive float64 step, and what the optimizer makes of the pull."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rosu_llm.errors import ConfigError
from rosu_llm.geometry import build_rule
from rosu_llm.space import LocalSpace
from rosu_llm.step import StepEngine, UnlearningStep
from tests.algorithm1 import Flat, mean_nll
from tests.models import CleanLM, flat, samples

FORGET, RETAIN = samples(4, seed=1), samples(5, seed=2)
EPS = 1e-8


def take(step: UnlearningStep, model: nn.Module, single: int = 0) -> dict[str, float]:
    """One step over the two sets; ``single`` retain samples beside."""
    weights = lambda: dict(model.named_parameters())
    closures = [lambda i=i: mean_nll(model, weights(), [RETAIN[i]]) for i in range(single)]
    return step(
        lambda: mean_nll(model, weights(), FORGET), lambda: mean_nll(model, weights(), RETAIN), samples=closures
    )


def optimizer_of(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "weight_decay": 0.0, **settings})


def metric_of(optimizer: torch.optim.Optimizer) -> Tensor:
    """D = √v̂ + ε, from the state of AdamW."""
    (group,) = optimizer.param_groups
    states = [optimizer.state[p] for p in group["params"]]
    return flat(s["exp_avg_sq"] / (1.0 - group["betas"][1] ** s["step"].double()) for s in states).sqrt() + EPS


def gradients(model: nn.Module, space: Flat, w: Tensor, *sets: list[Any]) -> list[Tensor]:
    return [space.gradient(lambda weights, x=x: mean_nll(model, weights, x), w) for x in sets]


def trained(steps: int = 2, **settings: Any) -> tuple[nn.Module, torch.optim.AdamW, UnlearningStep]:
    """A model some steps into a run, so that the optimizer has second moments."""
    model = CleanLM().double()
    optimizer = optimizer_of(model)
    step = UnlearningStep(model, optimizer, rho=0.3, **settings)
    for _ in range(steps):
        take(step, model, 3 if settings.get("protect_rank", 1) > 1 else 0)
    return model, optimizer, step


@pytest.mark.parametrize("rank", [1, 3])
def test_a_step_in_the_optimizers_metric_is_the_naive_one(rank: int) -> None:
    """q = f − R (RᵀD⁻¹R)⁻¹ RᵀD⁻¹f, δ = ρ D⁻¹q/‖D⁻¹q‖, v by the relaxed Jacobian in coordinates D^½ w, then AdamW."""
    model, optimizer, step = trained(metric="adam", protect_rank=rank, beta=0.2, amplify="direct")
    d, space = metric_of(optimizer), Flat(model)
    w = space.vector()
    f, r = gradients(model, space, w, FORGET, RETAIN)
    protected = [r] if rank == 1 else gradients(model, space, w, *([x] for x in RETAIN[:rank]))
    basis = torch.linalg.qr(torch.stack([x / d.sqrt() for x in protected], 1))[0]  # plain ROSU of D^-½ g
    without = lambda x: x - basis @ (basis.T @ x)
    q = without(f / d.sqrt())
    p = q / d.sqrt()
    delta = 0.3 * p / p.norm()
    (s,) = gradients(model, space, w + delta, RETAIN)
    white = s / d.sqrt()
    v = s + 0.3 / p.norm() * d.sqrt() * (without(white) - (q @ white) / (q @ q) * q)

    twin, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    other = optimizer_of(twin)
    other.load_state_dict(state)
    for p_, g in zip(twin.parameters(), v.split([x.numel() for x in twin.parameters()]), strict=True):
        p_.grad = g.view_as(p_).clone()
    other.step()
    expected = flat(twin.parameters()) + 0.2 * delta

    logs = take(step, model, rank if rank > 1 else 0)
    # Adam divides by √v̂ + 1e-8, which magnifies 1e-14 differences of tiny gradient entries
    assert float((flat(model.parameters()) - expected).norm() / (expected - w).norm()) < 1e-7
    if rank == 1:
        assert abs(logs["metric/leak"]) < 1e-9
    assert logs["step/fallback"] == 0.0


def frozen(model: nn.Module) -> torch.optim.Adam:
    """Adam with β₁ = 0 whose second moments are given, far from uniform and practically constant."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.0, 1.0 - 1e-12), eps=EPS)
    generator = torch.Generator().manual_seed(4)
    for p in model.parameters():
        second = torch.exp(3.0 * torch.randn(p.shape, dtype=p.dtype, generator=generator))
        optimizer.state[p] = {"step": torch.tensor(1e12), "exp_avg": torch.zeros_like(p), "exp_avg_sq": second}
    return optimizer


def pulled(metric: str) -> tuple[float, dict[str, float]]:
    """cos(r, Δw) of a step that is the pull alone, handed to the optimizer; and what was logged."""
    model = CleanLM().double()
    space = Flat(model)
    w = space.vector()
    (r,) = gradients(model, space, w, RETAIN)
    step = UnlearningStep(
        model, frozen(model), rho=0.3, metric=metric, amplify="optimizer", components="delta_only", tau=0.0
    )
    logs = take(step, model)
    move = flat(model.parameters()) - w
    assert float(move.norm()) > 0.0
    return float(r @ move / (r.norm() * move.norm())), logs


def test_the_preconditioned_pull_is_retain_neutral_in_the_optimizers_metric_only() -> None:
    neutral, logs = pulled("adam")
    leaking, plain = pulled("euclidean")
    assert abs(neutral) < 1e-10
    assert abs(leaking) > 1e-3
    assert abs(logs["metric/leak"]) < 1e-10
    # the Euclidean number logged beside it is the cosine of the same pull, in the metric
    assert logs["metric/leak_euclidean"] == pytest.approx(euclidean_leak(), rel=1e-9)
    assert abs(logs["metric/leak_euclidean"]) > 1e-3
    assert "metric/leak" not in plain


def euclidean_leak() -> float:
    model = CleanLM().double()
    optimizer, space = frozen(model), Flat(model)
    inverse = 1.0 / metric_of(optimizer)
    f, r = gradients(model, space, space.vector(), FORGET, RETAIN)
    q = f - (f @ r) / (r @ r) * r
    return float((r * inverse) @ q / (((r * inverse) @ r) * ((q * inverse) @ q)).sqrt())


def test_the_first_step_has_no_second_moments_and_is_euclidean(caplog: pytest.LogCaptureFixture) -> None:
    ends = []
    for metric in ("adam", "euclidean"):
        model = CleanLM().double()
        with caplog.at_level("INFO"):
            logs = take(UnlearningStep(model, optimizer_of(model), rho=0.3, metric=metric, tau=0.0), model)
        ends.append(flat(model.parameters()))
        assert "metric/leak" not in logs
    assert float((ends[0] - ends[1]).norm() / ends[1].norm()) < 1e-9
    assert caplog.text.count("starts with the next step") == 1


def test_gu_in_the_optimizers_metric() -> None:
    """v = P_T r − (I − P_T) f with P_T orthogonal in ⟨x, D⁻¹y⟩: D⁻¹ of the forget part is neutral for every sample."""
    model = CleanLM().double()
    optimizer = frozen(model)
    d, space = metric_of(optimizer), Flat(model)
    f, r, *single = gradients(model, space, space.vector(), FORGET, RETAIN, *([x] for x in RETAIN[:3]))
    root = d.sqrt()
    basis = torch.linalg.qr(torch.stack([x / root for x in single], 1))[0]
    onto = lambda x: root * (basis @ (basis.T @ (x / root)))
    written: dict[str, Tensor] = {}
    optimizer.register_step_pre_hook(lambda *_: written.update(v=flat(p.grad for p in model.parameters())))
    step = UnlearningStep(model, optimizer, method="gu", metric="adam", protect_rank=3)
    logs = take(step, model, 3)
    expected = onto(r) - (f - onto(f))
    assert float((written["v"] - expected).norm() / expected.norm()) < 1e-9
    forget_part = (written["v"] - onto(r)) / d
    assert all(abs(float(x @ forget_part)) < 1e-9 * float(x.norm() * forget_part.norm()) for x in single)
    assert logs["subspace/rank"] == 3.0


def test_a_parameter_the_optimizer_has_not_met_is_not_moved_by_the_pull() -> None:
    model = CleanLM().double()
    optimizer = frozen(model)
    del optimizer.state[model.head.weight]
    space = LocalSpace(model.parameters())
    engine = StepEngine(build_rule("rosu", metric="adam"), space, optimizer=optimizer)
    window = {"forget": FORGET, "retain": RETAIN}
    closures = {k: [lambda x=x: mean_nll(model, dict(model.named_parameters()), x)] for k, x in window.items()}
    outcome = engine.run(closures, rho=0.3)
    assert outcome.inner is not None
    assert set(outcome.inner.delta) == {"p"}
    moved = dict(zip(dict(model.named_parameters()), space._captured["p"], strict=True))
    assert not moved["head.weight"].any()
    assert moved["mix.weight"].any()


def test_a_coordinate_without_second_moment_is_not_moved_either() -> None:
    """D = ε there would let it make up all of δ."""
    model = CleanLM().double()
    optimizer = frozen(model)
    optimizer.state[model.out.bias]["exp_avg_sq"][0] = 0.0
    start = model.out.bias.detach().clone()
    step = UnlearningStep(model, optimizer, rho=0.3, metric="adam", components="delta_only", amplify="direct", beta=1.0)
    logs = take(step, model)
    moved = model.out.bias.detach() - start
    assert moved[0] == 0.0
    assert bool((moved[1:] != 0.0).all())
    assert abs(logs["coupling/leak"]) < 1e-12


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_other_optimizers_are_refused(make: Any) -> None:
    model = CleanLM()
    with pytest.raises(ConfigError, match=f"{make.__name__} does not keep"):
        UnlearningStep(model, make(model.parameters(), lr=0.1), metric="adam")


def test_the_metric_needs_the_optimizer() -> None:
    with pytest.raises(ConfigError, match="optimizer="):
        StepEngine(build_rule("rosu", metric="adam"), LocalSpace(CleanLM().parameters()))
