"""The engine is Algorithm 1, over the whole window, and leaves nothing behind when it fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rosu_llm.data.pairing import ForgetRetainCollator
from rosu_llm.errors import DataError, NonFiniteError, PerturbedWeightsError
from rosu_llm.geometry import build_rule
from rosu_llm.losses import COUNT, LossContext, get_loss
from rosu_llm.space import LocalSpace
from rosu_llm.step import StepEngine, UnlearningStep
from tests.algorithm1 import algorithm_1
from tests.models import CleanLM, flat, samples

FORGET, RETAIN = samples(4, seed=1), samples(5, seed=2)


def shares(model: nn.Module, items: list[dict[str, list[int]]], sizes: list[int]) -> list[Callable[[], Tensor]]:
    """Closures over micro-batches of the given sizes; their sum is the mean over all answer tokens."""
    collate, nll = ForgetRetainCollator(0), get_loss("nll", "retain")
    total = COUNT["token"](collate(items))
    batches, start = [], 0
    for size in sizes:
        batches.append(collate(items[start : start + size]))
        start += size
    return [lambda b=b: nll.function(model, b, LossContext()) / total for b in batches]


@pytest.mark.parametrize("jacobian", ["relaxed", "none"])
@pytest.mark.parametrize("sizes", [([4], [5]), ([1, 1, 1, 1], [2, 2, 1]), ([3, 1], [1, 4])])
def test_one_sgd_step_is_algorithm_1(jacobian: str, sizes: tuple[list[int], list[int]]) -> None:
    model = CleanLM().double()
    w, expected = algorithm_1(model, FORGET, RETAIN, eta=0.1, rho=0.3, beta=0.1 / 0.3, zero_order=jacobian == "none")
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.1), rho=0.3, jacobian=jacobian)
    step(shares(model, FORGET, sizes[0]), shares(model, RETAIN, sizes[1]))
    # float64 throughout; gradients of nested softmaxes agree to about 1e-14
    assert float((flat(model.parameters()) - expected).norm() / (expected - w).norm()) < 1e-9


@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_a_fixed_beta_is_added_literally(beta: float) -> None:
    model = CleanLM().double()
    w, expected = algorithm_1(model, FORGET, RETAIN, eta=0.05, rho=0.2, beta=beta)
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.05), rho=0.2, beta=beta)
    step(shares(model, FORGET, [4]), shares(model, RETAIN, [5]))
    assert float((flat(model.parameters()) - expected).norm() / (expected - w).norm()) < 1e-9


def test_through_plain_sgd_the_optimizer_mode_is_the_direct_one() -> None:
    """SGD is linear: v − (β/η)δ stepped with η moves by βδ − ηv."""
    model = CleanLM().double()
    w, expected = algorithm_1(model, FORGET, RETAIN, eta=0.05, rho=0.2, beta=0.05 / 0.2)
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.05), rho=0.2, amplify="optimizer")
    step(shares(model, FORGET, [4]), shares(model, RETAIN, [5]))
    assert float((flat(model.parameters()) - expected).norm() / (expected - w).norm()) < 1e-9


def test_the_matched_pull_has_its_length_and_direction() -> None:
    """w_after − w_AdamW = κ‖Δ_AdamW‖ u, with AdamW stepped on v alone."""
    model, twin = CleanLM().double(), CleanLM().double()
    settings = {"lr": 0.01, "weight_decay": 0.1}
    w, algorithm = algorithm_1(model, FORGET, RETAIN, eta=1.0, rho=0.3, beta=0.0)
    v = w - algorithm
    optimizer = torch.optim.AdamW(twin.parameters(), **settings)
    for p, g in zip(twin.parameters(), v.split([p.numel() for p in twin.parameters()]), strict=True):
        p.grad = g.view_as(p).clone()
    optimizer.step()
    stepped = flat(twin.parameters())
    _, pulled = algorithm_1(model, FORGET, RETAIN, eta=0.0, rho=1.0, beta=1.0)
    u = pulled - w
    step = UnlearningStep(
        model, torch.optim.AdamW(model.parameters(), **settings), rho=0.3, amplify="matched", kappa=0.7
    )
    logs = step(shares(model, FORGET, [4]), shares(model, RETAIN, [5]))
    expected = stepped + 0.7 * (stepped - w).norm() * u
    # Adam divides by √v̂ + 1e-8, which magnifies 1e-14 differences of tiny gradient entries
    assert float((flat(model.parameters()) - expected).norm() / (expected - w).norm()) < 1e-7
    assert logs["step/amplification_ratio"] == pytest.approx(0.7)


def test_rho_to_zero_is_retain_descent_plus_the_pull() -> None:
    """With ρ → 0: s → r, α → 0, v → r and, tied, βδ = ηu stays."""
    model = CleanLM().double()
    w, retain_only = algorithm_1(model, FORGET, RETAIN, eta=0.05, rho=1.0, beta=0.0, eps_q=float("inf"))
    _, pulled = algorithm_1(model, FORGET, RETAIN, eta=0.0, rho=1.0, beta=1.0)
    expected = retain_only + 0.05 * (pulled - w)
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.05), rho=1e-9)
    step(shares(model, FORGET, [4]), shares(model, RETAIN, [5]))
    # deviation is of order ρ times curvature; 1e-9 apart from rounding of s at w+δ
    assert float((flat(model.parameters()) - expected).norm() / (expected - w).norm()) < 1e-6


def test_collinear_gradients_fall_back_to_retain_descent() -> None:
    model = CleanLM().double()
    w, expected = algorithm_1(model, RETAIN, RETAIN, eta=0.05, rho=0.3, beta=0.2)
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.05), rho=0.3, beta=0.2)
    logs = step(shares(model, RETAIN, [5]), shares(model, RETAIN, [5]))
    assert logs["step/fallback"] == 1.0
    assert "loss/surrogate" not in logs
    assert float((flat(model.parameters()) - expected).norm() / (expected - w).norm()) < 1e-12


def test_the_surrogate_pass_replays_dropout_bit_for_bit() -> None:
    """At δ = 0 (so small that every weight rounds back) s equals r to the last bit, dropout on."""
    model = CleanLM(dropout=0.4)
    space = LocalSpace(model.parameters())
    engine = StepEngine(build_rule("rosu"), space, module=model)
    torch.manual_seed(5)
    captured: dict[str, list[Tensor]] = {}
    original = space.write_gradient

    def spy(vector: object, *, precise: bool = False) -> None:
        captured["s"] = [p.grad.clone() for p in space.parameters]
        captured["r"] = [t.clone() for t in space._captured["r"]]
        original(vector, precise=precise)  # type: ignore[arg-type]

    space.write_gradient = spy  # type: ignore[method-assign]
    outcome = engine.run({"forget": shares(model, FORGET, [2, 2]), "retain": shares(model, RETAIN, [2, 3])}, rho=1e-30)
    assert all(torch.equal(s, r) for s, r in zip(captured["s"], captured["r"], strict=True))
    assert outcome.losses["surrogate"] == outcome.losses["retain"]


def test_dropout_differs_between_steps() -> None:
    model = CleanLM(dropout=0.4)
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.0), rho=0.1)
    losses = [step(shares(model, FORGET, [4]), shares(model, RETAIN, [5]))["loss/retain"] for _ in range(2)]
    assert losses[0] != losses[1]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.outer = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.norm(self.inner(x))))


@pytest.mark.parametrize("jacobian", ["relaxed", "exact"])
def test_batchnorm_statistics_move_in_the_retain_pass_at_w_alone(jacobian: str) -> None:
    """Neither at w+δ, whose activations are of weights that are not kept, nor by samples that are to be forgotten."""
    forget, retain = torch.randn(16, 6), torch.randn(16, 6)
    loss = lambda m, x: m(x).square().mean()
    model, twin = Normed(), Normed()
    twin(retain)
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, jacobian=jacobian)
    step(lambda: loss(model, forget), lambda: loss(model, retain))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(model.norm, name), getattr(twin.norm, name))


@pytest.mark.parametrize("which", ["forget", "retain", "surrogate"])
def test_an_exception_in_any_pass_leaves_the_weights_untouched(which: str) -> None:
    model = CleanLM()
    before = flat(model.parameters())
    calls = {"forget": 0, "retain": 0}

    def failing(part: str, closure: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            calls[part] += 1
            if part == which or (which == "surrogate" and part == "retain" and calls["retain"] == 4):
                raise RuntimeError("out of memory")
            return closure()

        return run

    window = {
        part: [failing(part, c) for c in shares(model, items, [2, len(items) - 2])]
        for part, items in (("forget", FORGET), ("retain", RETAIN))
    }
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5)
    with pytest.raises(RuntimeError, match="out of memory"):
        step(window["forget"], window["retain"])
    assert torch.equal(flat(model.parameters()), before)
    assert all(p.grad is None for p in model.parameters())
    assert not step.space.is_perturbed
    step(shares(model, FORGET, [4]), shares(model, RETAIN, [5]))  # and the next step works


@pytest.mark.parametrize("part", ["forget", "retain"])
def test_nan_loss_is_one_clear_error(part: str) -> None:
    model = CleanLM()
    before = flat(model.parameters())
    bad = [lambda: model.out.weight.sum() * float("nan")]
    window = {"forget": shares(model, FORGET, [4]), "retain": shares(model, RETAIN, [5]), part: bad}
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(NonFiniteError, match=part):
        step(window["forget"], window["retain"])
    assert torch.equal(flat(model.parameters()), before)


def test_infinite_gradient_with_finite_loss_is_one_clear_error() -> None:
    model = CleanLM()
    before = flat(model.parameters())
    weird = [lambda: (model.out.bias * 0.0).abs().sqrt().sum()]  # 0 with derivative NaN
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(NonFiniteError, match="gradient f"):
        step(weird, shares(model, RETAIN, [5]))
    assert torch.equal(flat(model.parameters()), before)


@pytest.mark.parametrize("method", ["pcgrad", "gu"])
def test_a_coefficient_beyond_float32_is_one_clear_error(method: str) -> None:
    """A forget gradient of 10²⁰ beside a retain gradient of 10⁻¹⁸, as after training diverged."""
    model = CleanLM()
    before = flat(model.parameters())
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.1), method=method)
    weight = model.out.weight
    forget, retain = [lambda: 1e20 * weight.sum()], [lambda: 1e-18 * (weight[0].sum() + model.out.bias.sum())]
    given = {"samples": retain} if method == "gu" else {}
    with pytest.raises(NonFiniteError, match=r"has all but vanished beside the others: the step would take .*e\+3"):
        step(forget, retain, **given)
    assert torch.equal(flat(model.parameters()), before)


def test_missing_part_is_one_clear_error() -> None:
    model = CleanLM()
    engine = StepEngine(build_rule("rosu"), LocalSpace(model.parameters()))
    with pytest.raises(DataError, match="'forget'"):
        engine.run({"retain": shares(model, RETAIN, [5])}, rho=0.1)


def test_stepping_the_optimizer_inside_the_perturbed_pass_is_refused() -> None:
    model = CleanLM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = UnlearningStep(model, optimizer, rho=0.5)
    closures, calls = shares(model, RETAIN, [5]), []

    def sneaky() -> Tensor:
        calls.append(1)
        if len(calls) == 2:  # the surrogate pass
            optimizer.step()
        return closures[0]()

    with pytest.raises(PerturbedWeightsError):
        step(shares(model, FORGET, [4]), sneaky)


def test_overflow_under_loss_scaling_skips_the_step() -> None:
    model = CleanLM()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    engine = StepEngine(build_rule("rosu"), LocalSpace(model.parameters(), scaler=scaler), loss_scaling=True)
    weird = [lambda: (model.out.bias * 0.0).abs().sqrt().sum()]
    before = flat(model.parameters())
    outcome = engine.run({"forget": weird, "retain": shares(model, RETAIN, [5])}, rho=0.1)
    assert outcome.skipped
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.step(optimizer)
    assert torch.equal(flat(model.parameters()), before)


@pytest.mark.parametrize(
    ("method", "combine"),
    [
        ("graddiff", lambda f, r: 0.5 * r - 2.0 * f),
        ("ft", lambda f, r: r),
        ("ng", lambda f, r: -f),
    ],
)
def test_methods_without_surrogate_are_their_formula(method: str, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
    from tests.algorithm1 import Flat, mean_nll

    model = CleanLM().double()
    space = Flat(model)
    w = space.vector()
    f = space.gradient(lambda weights: mean_nll(model, weights, FORGET), w)
    r = space.gradient(lambda weights: mean_nll(model, weights, RETAIN), w)
    weights = {"forget_weight": 2.0, "retain_weight": 0.5} if method == "graddiff" else {}
    step = UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.1), method=method, **weights)
    step(shares(model, FORGET, [2, 2]), shares(model, RETAIN, [5]))
    expected = w - 0.1 * combine(f, r)
    assert float((flat(model.parameters()) - expected).norm() / (expected - w).norm()) < 1e-9


def test_schedules_are_followed() -> None:
    model = CleanLM()
    step = UnlearningStep(
        model, torch.optim.SGD(model.parameters(), lr=0.01), rho=0.4, rho_schedule="cosine", total_steps=4
    )
    norms = [step(shares(model, FORGET, [4]), shares(model, RETAIN, [5]))["perturb/norm"] for _ in range(4)]
    assert norms == pytest.approx([0.4, 0.2 + 0.2 * 2**-0.5, 0.2, 0.2 - 0.2 * 2**-0.5])


@pytest.mark.parametrize("jacobian", ["relaxed", "exact"])
def test_the_amplification_is_compared_with_a_v_that_cancels(jacobian: str) -> None:
    """Small ‖q‖: α = 200 times s − c₁r, which is zero here, so v = r has to be measured before it is written.

    The losses are linear, so that the exact v is the relaxed one.
    """
    x = nn.Parameter(torch.zeros(2))
    step = UnlearningStep(
        nn.ParameterList([x]), torch.optim.SGD([x], lr=0.1), rho=0.2, amplify="optimizer", jacobian=jacobian
    )
    logs = step(lambda: x[0] + 1e-3 * x[1], lambda: 100.0 * x[0])
    assert logs["step/amplification_ratio"] == pytest.approx(1 / 100, rel=1e-4)  # ‖u‖/‖r‖
    assert torch.allclose(x.detach(), torch.tensor([-10.0, 0.1]), rtol=1e-4)
