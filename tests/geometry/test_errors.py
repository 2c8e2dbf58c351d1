"""Every setting that cannot work is refused with a message that names what was passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rosu_llm.errors import ConfigError, RosuError
from rosu_llm.geometry import Rosu, Stabilizer, build_rule
from rosu_llm.geometry.methods.graddiff import GradDiff
from rosu_llm.geometry.methods.minmax import MinMax
from rosu_llm.geometry.methods.uam import Uam
from rosu_llm.step.calibration import pull_factor
from rosu_llm.step.schedules import BetaSchedule, RhoSchedule

NAN, INF = float("nan"), float("inf")


def refuse(make: Callable[[], Any], setting: str, given: object) -> str:
    """`make` must raise a ConfigError naming the setting and the value; its message."""
    with pytest.raises(ConfigError) as caught:
        make()
    message = str(caught.value)
    assert setting in message
    assert repr(given) in message
    assert isinstance(caught.value, ValueError)  # for callers that know only builtins
    assert isinstance(caught.value, RosuError)
    return message


@pytest.mark.parametrize(("given", "hint"), [("rosuu", "rosu"), ("min-max", "minmax"), ("GradDiff", "graddiff")])
def test_unknown_method(given: str, hint: str) -> None:
    """The known methods are listed and the nearest one is offered."""
    message = refuse(lambda: build_rule(given), "method", given)
    assert f"Did you mean '{hint}'?" in message
    for name in ("ft", "graddiff", "minmax", "ng", "rosu", "uam"):
        assert name in message


def test_unknown_method_without_a_near_one() -> None:
    """No hint is invented."""
    assert "Did you mean" not in refuse(lambda: build_rule("xyz123"), "method", "xyz123")


def test_unknown_option() -> None:
    """A misspelt option is not ignored."""
    assert "'eps_q'" in refuse(lambda: build_rule("rosu", epsq=1e-6), "method option", "epsq")


@pytest.mark.parametrize("make", [Rosu, MinMax, lambda jacobian: build_rule("rosu", jacobian=jacobian)])
def test_unknown_jacobian(make: Callable[..., Any]) -> None:
    """Only what the rule has is offered: Hessians are ROSU's alone."""
    message = refuse(lambda: make(jacobian="relaxd"), "jacobian", "relaxd")
    assert "Did you mean 'relaxed'?" in message


@pytest.mark.parametrize("make", [MinMax])
def test_hessians_are_for_rosu_alone(make: Callable[..., Any]) -> None:
    message = refuse(lambda: make(jacobian="exact"), "jacobian", "exact")
    assert "none, relaxed" in message


@pytest.mark.parametrize("make", [lambda mode: Stabilizer(1e-8, mode), lambda mode: build_rule("rosu", tau_mode=mode)])
def test_unknown_tau_mode(make: Callable[[str], Any]) -> None:
    """absolute or relative."""
    assert "Did you mean 'relative'?" in refuse(lambda: make("relativ"), "tau_mode", "relativ")


@pytest.mark.parametrize("tau", [-1e-8, -1.0, -INF, NAN])
def test_negative_tau(tau: float) -> None:
    """τ < 0 could make the denominator vanish."""
    refuse(lambda: Stabilizer(tau), "tau", tau)
    refuse(lambda: build_rule("rosu", tau=tau, tau_mode="relative"), "tau", tau)


@pytest.mark.parametrize("eps_q", [-1e-6, -INF, NAN])
def test_negative_threshold(eps_q: float) -> None:
    """ε_q < 0 would never fall back."""
    refuse(lambda: Rosu(eps_q=eps_q), "eps_q", eps_q)
    refuse(lambda: build_rule("rosu", eps_q=eps_q), "eps_q", eps_q)


@pytest.mark.parametrize("make", [MinMax, Uam, lambda eps_q: build_rule("minmax", eps_q=eps_q)])
@pytest.mark.parametrize("eps_q", [-1e-6, NAN])
def test_negative_threshold_of_the_standard_rules(make: Callable[..., Any], eps_q: float) -> None:
    """The same threshold means the same for min–max and UAM."""
    refuse(lambda: make(eps_q=eps_q), "eps_q", eps_q)


@pytest.mark.parametrize("weight", [-1.0, NAN])
@pytest.mark.parametrize("name", ["forget_weight", "retain_weight"])
def test_negative_weight(name: str, weight: float) -> None:
    """A negative weight would turn forgetting into learning, or retaining into forgetting."""
    refuse(lambda: GradDiff(**{name: weight}), name, weight)
    refuse(lambda: build_rule("graddiff", **{name: weight}), name, weight)


@pytest.mark.parametrize("rho", [0.0, -0.4, INF, -INF, NAN])
@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_radius_must_be_positive_and_finite(kind: str, rho: float) -> None:
    """ρ ≤ 0, NaN and infinity; the message says what to use for no perturbation."""
    message = refuse(lambda: RhoSchedule(rho, kind), "rho", rho)
    assert "'graddiff'" in message
    assert "'ft'" in message


def test_unknown_radius_schedule() -> None:
    """constant or cosine."""
    assert "Did you mean 'cosine'?" in refuse(lambda: RhoSchedule(0.4, "cosin"), "rho_schedule", "cosin")


@pytest.mark.parametrize("beta", ["tie", "", "0.05"])
def test_unknown_beta_name(beta: str) -> None:
    """A string is 'tied' or 'two_phase'; a number in quotes is not a number."""
    message = refuse(lambda: BetaSchedule(beta), "beta", beta)
    assert "'tied'" in message
    assert "'two_phase'" in message


@pytest.mark.parametrize("beta", [-1e-9, -1, -INF, INF, NAN])
def test_negative_beta(beta: float) -> None:
    """β < 0 would pull towards remembering; infinity and NaN are no amounts."""
    refuse(lambda: BetaSchedule(beta), "beta", beta)


@pytest.mark.parametrize("name", ["start", "high", "low"])
@pytest.mark.parametrize("level", [-0.001, NAN])
def test_negative_level(name: str, level: float) -> None:
    """The three levels of two_phase are amounts, too."""
    refuse(lambda: BetaSchedule("two_phase", **{name: level}), f"beta_{name}", level)


@pytest.mark.parametrize("name", ["start", "high", "low"])
def test_infinite_level(name: str) -> None:
    """An infinite level is refused like an infinite β."""
    refuse(lambda: BetaSchedule("two_phase", **{name: INF}), f"beta_{name}", INF)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, NAN])
def test_warmup_is_a_share(ratio: float) -> None:
    """Between 0 and 1."""
    refuse(lambda: BetaSchedule("two_phase", warmup_ratio=ratio), "beta_warmup_ratio", ratio)


@pytest.mark.parametrize("margin", [0.0, -1.0, NAN])
def test_margin_must_be_positive(margin: float) -> None:
    """A margin of 0 would divide by zero."""
    refuse(lambda: pull_factor(2.0, 1.0, margin), "calibrate_margin", margin)
