"""Schedules of ρ and β (appendix on implementation, "ROSU recipe")."""

from __future__ import annotations

from itertools import pairwise
from math import cos, pi

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rosu_llm import UnlearningStep
from rosu_llm.errors import ConfigError
from rosu_llm.step.schedules import AutoRadius, BetaSchedule, RhoSchedule
from tests.geometry.problems import EPS, bounded, exact_rosu, gram_of, norm, pair

totals = st.integers(1, 10**6)


@bounded
@given(totals, st.data(), st.floats(1e-6, 1e3))
def test_constant_radius(total: int, data: st.DataObject, rho: float) -> None:
    """ρ_t = ρ at every step."""
    step = data.draw(st.integers(0, total - 1))
    assert RhoSchedule(rho).at(step, total) == rho


@bounded
@given(totals, st.data(), st.floats(1e-6, 1e3))
def test_cosine_radius_is_positive_and_never_above_its_start(total: int, data: st.DataObject, rho: float) -> None:
    """0 < ρ_t ≤ ρ: the step that divides by ρ_t is safe to the last one."""
    schedule = RhoSchedule(rho, "cosine")
    step = data.draw(st.integers(0, total - 1))
    assert 0.0 < schedule.at(step, total) <= rho
    # ρ(1 + cos x) sums numbers of size ρ, so the value is good to a few EPS·ρ.
    assert schedule.at(step, total) == pytest.approx(0.5 * rho * (1.0 + cos(pi * step / total)), abs=4 * EPS * rho)


@pytest.mark.parametrize("total", [1, 2, 7, 1000])
def test_cosine_radius_at_its_ends_and_middle(total: int) -> None:
    """ρ_0 = ρ, ρ_{T/2} = ρ/2, monotone; past the end the last value is kept."""
    schedule = RhoSchedule(0.4, "cosine")
    values = [schedule.at(step, total) for step in range(total)]
    assert values[0] == 0.4
    assert all(later < earlier for earlier, later in pairwise(values))
    if total % 2 == 0:
        assert values[total // 2] == pytest.approx(0.2, rel=4 * EPS)  # cos(π/2) is 6e-17
    assert schedule.at(total, total) == schedule.at(10 * total, total) == values[-1] > 0.0


def test_radius_of_a_run_of_unknown_length_is_constant() -> None:
    """total ≤ 0: there is nothing to anneal over."""
    assert RhoSchedule(0.4, "cosine").at(5, 0) == 0.4
    assert RhoSchedule(0.4, "cosine").at(5, -1) == 0.4


@bounded
@given(st.floats(1e-8, 1.0), st.floats(1e-3, 10.0))
def test_tied_beta_is_learning_rate_over_radius(rate: float, rho: float) -> None:
    """β_t = η_t/ρ_t, whatever the step."""
    schedule = BetaSchedule("tied")
    assert schedule.tied
    assert schedule.at(3, 10, rate, rho) == pytest.approx(rate / rho, rel=2 * EPS)  # one quotient
    assert schedule.at(3, 10, rate, rho) == schedule.at(9, 10, rate, rho)


@pytest.mark.parametrize("rho", [0.1, 0.4, 7.0])
def test_tied_amplification_moves_by_the_learning_rate(rho: float) -> None:
    """‖β_t δ‖ = η_t whatever ρ: tying removes the radius from the length of the pull."""
    p = pair("random", seed=2)
    answer = exact_rosu().inner(gram_of(p.vectors), rho)
    step = BetaSchedule().at(0, 10, 3e-4, rho) * answer.delta
    length = norm(step["f"] * p.f + step["r"] * p.r)
    assert length == pytest.approx(3e-4, rel=64 * EPS)  # ‖δ‖ = ρ at an ordinary angle


@pytest.mark.parametrize("beta", [0.0, 0.05, 1, 3.5])
def test_fixed_beta_is_fixed(beta: float) -> None:
    """A number is used as it is, as a float."""
    schedule = BetaSchedule(beta)
    assert not schedule.tied
    for step in (0, 5, 9):
        value = schedule.at(step, 10, 1e-4, 0.4)
        assert value == beta
        assert isinstance(value, float)


def test_two_phase_levels() -> None:
    """0.001 → 0.06 over the warm-up, then 0.012 (the levels of the paper)."""
    schedule = BetaSchedule("two_phase", warmup_ratio=0.1)
    values = [schedule.at(step, 100, 1e-4, 0.4) for step in range(100)]
    assert values[0] == 0.001
    assert values[9] == pytest.approx(0.06, rel=4 * EPS)  # one sum, one product, one quotient
    assert values[10:] == [0.012] * 90
    steps = [later - earlier for earlier, later in pairwise(values[:10])]
    assert steps == pytest.approx([(0.06 - 0.001) / 9] * 9, rel=64 * EPS)  # differences of nearby numbers


def test_two_phase_with_its_own_levels() -> None:
    """start, high, low and the share of the warm-up can be chosen."""
    schedule = BetaSchedule("two_phase", start=0.25, high=0.75, low=0.5, warmup_ratio=0.5)
    assert [schedule.at(step, 6, 1.0, 1.0) for step in range(6)] == [0.25, 0.5, 0.75, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_two_phase_on_a_run_too_short_to_warm_up(ratio: float) -> None:
    """The warm-up has at least one step, at the starting level; no division by zero."""
    schedule = BetaSchedule("two_phase", warmup_ratio=ratio)
    assert [schedule.at(step, 3, 1.0, 1.0) for step in range(3)] == [0.001, 0.012, 0.012]


@pytest.mark.parametrize("beta", ["tied", "two_phase", 0.05, 0.0])
def test_no_learning_rate_no_amplification(beta: str | float) -> None:
    """η_t = 0 gives β_t = 0 in every mode: there is no step to amplify."""
    for step in (0, 5, 99):
        assert BetaSchedule(beta).at(step, 100, 0.0, 0.4) == 0.0


def test_tied_is_the_default() -> None:
    """The no-search default of the paper, at constant radius."""
    assert BetaSchedule().tied
    assert RhoSchedule(0.4).kind == "constant"


def quadratic(scale: float) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """w, the curvature A of L_r = ½ wᵀAw, and the gradient g of L_f = g·w; all in units of ``scale``."""
    generator = torch.Generator().manual_seed(5)
    holder = torch.nn.Linear(6, 1, bias=False).double()
    with torch.no_grad():
        holder.weight.copy_(scale * torch.randn(1, 6, generator=generator, dtype=torch.float64))
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    return holder, root @ root.T, torch.randn(6, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("share", [1e-4, 0.01])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_automatic_radius_finds_the_rise_it_is_told(share: float, scale: float) -> None:
    """½ρ²uᵀAu = share · L_r(w) has one positive solution; weights a million times as large change its unit only."""
    holder, curvature, slope = quadratic(scale)
    w = holder.weight[0].detach().clone()
    step = UnlearningStep(holder, torch.optim.SGD(holder.parameters(), lr=1e-300), rho="auto", rho_share=share, tau=0.0)

    def retain() -> torch.Tensor:
        return 0.5 * holder.weight[0] @ curvature @ holder.weight[0]

    for _ in range(40):
        logged = step(lambda: slope @ holder.weight[0], retain)
    r = curvature @ w
    q = slope - (slope @ r) / (r @ r) * r
    u = q / q.norm()
    expected = (2.0 * share * retain().item() / (u @ curvature @ u).item()) ** 0.5
    assert step.radius is not None
    assert step.radius.rho == pytest.approx(expected, rel=1e-6)  # float64 losses differ by rounding
    assert logged["perturb/rho"] == pytest.approx(expected, rel=1e-6)
    assert logged["perturb/rise"] == pytest.approx(share, rel=1e-6)


def test_the_automatic_radius_moves_by_a_bounded_factor_and_stays_in_its_range() -> None:
    radius = AutoRadius(0.1)
    assert radius.at(lambda: 50.0) == pytest.approx(0.05)
    radius.observe({"retain": 1.0, "surrogate": 1e9}, 0.05)
    assert radius.rho == pytest.approx(0.05 / 1.5)
    for surrogate in (0.9, 1.0):  # no rise at all: as far up as allowed
        before = radius.at(lambda: 50.0)
        radius.observe({"retain": 1.0, "surrogate": surrogate}, before)
        assert radius.rho == pytest.approx(1.5 * before)
    for _ in range(50):
        radius.observe({"retain": 1.0, "surrogate": 1.0}, 1.0)
    assert radius.rho == pytest.approx(5.0)
    for _ in range(100):
        radius.observe({"retain": 1.0, "surrogate": 1e12}, 1.0)
    assert radius.rho == pytest.approx(5e-5)


@pytest.mark.parametrize("share", [0.0, -1.0, float("inf"), float("nan")])
def test_a_share_that_is_none(share: float) -> None:
    with pytest.raises(ConfigError, match="rho_share"):
        AutoRadius(share)
