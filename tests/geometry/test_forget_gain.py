"""Proposition 2: retain-neutrality keeps the share sin θ of the first-order forget gain."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given

from rosu_llm.geometry import build_rule

from .problems import (
    EPS,
    REGULAR,
    Pair,
    at_cosine,
    bounded,
    dense,
    exact_rosu,
    gram_of,
    inner,
    norm,
    pair,
    radii,
    regular_pairs,
)


def gains(p: Pair, rho: float) -> tuple[float, float]:
    """⟨f, δ_rosu⟩ and ⟨f, δ_std⟩."""
    gram = gram_of(p.vectors)
    rosu = dense(exact_rosu().inner(gram, rho).delta, p.vectors)
    standard = dense(build_rule("minmax", eps_q=0.0).inner(gram, rho).delta, p.vectors)
    return inner(p.f, rosu), inner(p.f, standard)


@bounded
@given(regular_pairs, radii)
def test_gain_ratio_is_sin_theta(p: Pair, rho: float) -> None:
    """⟨f, δ_rosu⟩/⟨f, δ_std⟩ = sin θ (Proposition 2)."""
    rosu, standard = gains(p, rho)
    # δ_rosu is neutral up to EPS/sin θ, which f weighs with cos θ: relative to sin θ this is EPS/sin²θ.
    assert rosu / standard == pytest.approx(p.sine, rel=16 * EPS / p.sine**2)


@pytest.mark.parametrize("cosine", [-0.99, -0.6, 0.0, 0.28, 0.6, 0.96])
def test_gain_ratio_at_prescribed_angles(cosine: float) -> None:
    """The same against √(1 − cos²θ) with the angle chosen beforehand (Proposition 2)."""
    for seed in range(3):
        rosu, standard = gains(at_cosine(cosine, seed, f_norm=3.0, r_norm=0.2), rho=0.4)
        # 64 roundings at sin θ ≥ 0.14, where the amplification of EPS is below 50.
        assert rosu / standard == pytest.approx(sqrt(1.0 - cosine**2), rel=64 * EPS * 50)


@bounded
@given(regular_pairs, radii)
def test_standard_gain_is_rho_times_norm_of_f(p: Pair, rho: float) -> None:
    """⟨f, δ_std⟩ = ρ‖f‖ (proof of Proposition 2)."""
    assert gains(p, rho)[1] == pytest.approx(rho * norm(p.f), rel=16 * EPS)  # no cancellation anywhere


@pytest.mark.parametrize("kind", REGULAR)
def test_protecting_more_never_gains_more(kind: str) -> None:
    """{0} ⊆ span(r): protection never raises the gain (Proposition 6, nested subspaces)."""
    for seed in range(5):
        rosu, standard = gains(pair(kind, seed), rho=0.4)
        assert 0.0 < rosu <= standard * (1.0 + 16 * EPS)  # equality up to rounding where f ⟂ r
