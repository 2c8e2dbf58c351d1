"""Methods by name: what `build_rule` makes of a method and its options."""

from __future__ import annotations

import pytest

from rosu_llm.geometry import METHODS, Rosu, Stabilizer, build_rule
from rosu_llm.geometry.methods.base import Rule
from rosu_llm.geometry.methods.descent import FineTune, GradDiff, NegativeGradient
from rosu_llm.geometry.methods.gu import GU
from rosu_llm.geometry.methods.minmax import MinMax, Uam, UamReflected, UamRelaxed
from rosu_llm.geometry.methods.orthograd import OrthoGrad
from rosu_llm.geometry.methods.pcgrad import Blur, PCGrad, PCGradConflict
from rosu_llm.geometry.methods.sam_npo import SharpnessAware
from rosu_llm.geometry.subspace import Protection


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("rosu", Rosu("relaxed", Stabilizer(1e-8, "absolute"), 1e-6)),
        ("minmax", MinMax("relaxed", 1e-6)),
        ("uam", Uam("none", 1e-6)),
        ("uam_relaxed", UamRelaxed("relaxed", 1e-6)),
        ("uam_reflected", UamReflected("none", 1e-6, 2.0)),
        ("pcgrad", PCGrad(1.0, 1.0)),
        ("pcgrad_conflict", PCGradConflict(1.0, 1.0)),
        ("blur", Blur(1.0, 1.0)),
        ("sam_npo", SharpnessAware(1.0, 1.0, 1e-6)),
        ("orthograd", OrthoGrad(Protection(8, mean=False), 0.5)),
        ("gu", GU(Protection(8, mean=False), "euclidean")),
        ("graddiff", GradDiff(1.0, 1.0)),
        ("ft", FineTune()),
        ("ng", NegativeGradient()),
    ],
)
def test_defaults_are_those_of_the_paper(method: str, expected: Rule) -> None:
    """τ = 10⁻⁸, ε_q = 10⁻⁶, relaxed Jacobian, unit weights."""
    built = build_rule(method)
    assert built == expected
    assert type(built) is type(expected)


def test_every_method_is_covered_here() -> None:
    """A method added to the registry needs its tests."""
    assert sorted(METHODS) == sorted(
        (
            "rosu minmax uam uam_relaxed uam_reflected pcgrad pcgrad_conflict blur sam_npo orthograd gu graddiff ft ng"
        ).split()
    )


def test_options_reach_the_rule() -> None:
    """Each option ends up where it belongs."""
    rosu = build_rule("rosu", jacobian="none", tau=0.5, tau_mode="relative", eps_q=0.25)
    assert rosu == Rosu("none", Stabilizer(0.5, "relative"), 0.25)
    assert build_rule("minmax", jacobian="none", eps_q=0.25) == MinMax("none", 0.25)
    assert build_rule("uam", eps_q=0.25) == Uam(eps_q=0.25)
    assert build_rule("uam_reflected", reflection=1.0) == UamReflected(reflection=1.0)
    assert build_rule("sam_npo", forget_weight=2.0, retain_weight=3.0, eps_q=0.25) == SharpnessAware(2.0, 3.0, 0.25)
    for name, rule in (("pcgrad", PCGrad), ("pcgrad_conflict", PCGradConflict), ("blur", Blur)):
        assert build_rule(name, forget_weight=2.0, retain_weight=3.0) == rule(2.0, 3.0)
    assert build_rule("graddiff", forget_weight=2.0, retain_weight=3.0) == GradDiff(2.0, 3.0)


def test_what_rosu_asks_of_the_engine() -> None:
    """f, then r, then a retain pass at w + δ, then amplification."""
    rule = build_rule("rosu")
    assert rule.passes == ("forget", "retain")
    assert rule.perturbs
    assert rule.pulls
