"""Methods by name: what `build_rule` makes of a method and its options."""

from __future__ import annotations

import pytest

from rosu_llm.geometry import METHODS, Rosu, build_rule
from rosu_llm.geometry.methods.base import BaseRule
from rosu_llm.geometry.methods.forget_only import ForgetOnly
from rosu_llm.geometry.methods.graddiff import FineTune, GradDiff, NegativeGradient
from rosu_llm.geometry.methods.gu import GU
from rosu_llm.geometry.methods.minmax import MinMax
from rosu_llm.geometry.methods.orthograd import OrthoGrad
from rosu_llm.geometry.methods.others.llmu import LLMU
from rosu_llm.geometry.methods.others.scrub import Scrub
from rosu_llm.geometry.methods.others.ssd import SSD
from rosu_llm.geometry.methods.pcgrad import Blur, PCGrad, PCGradConflict
from rosu_llm.geometry.methods.sam_npo import SharpnessAware
from rosu_llm.geometry.methods.uam import Uam, UamReflected, UamRelaxed


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("rosu", Rosu(jacobian="relaxed", tau=1e-8, tau_mode="absolute", eps_q=1e-6)),
        ("minmax", MinMax(jacobian="relaxed", eps_q=1e-6)),
        ("uam", Uam(eps_q=1e-6)),
        ("uam_relaxed", UamRelaxed(eps_q=1e-6)),
        ("uam_reflected", UamReflected(eps_q=1e-6, reflection=2.0)),
        ("pcgrad", PCGrad(forget_weight=1.0, retain_weight=1.0)),
        ("pcgrad_conflict", PCGradConflict(forget_weight=1.0, retain_weight=1.0)),
        ("blur", Blur(forget_weight=1.0, retain_weight=1.0)),
        ("sam_npo", SharpnessAware(forget_weight=1.0, retain_weight=1.0, eps_q=1e-6)),
        ("orthograd", OrthoGrad(protect_rank=None, include_mean=False, orthograd_alpha=0.5)),
        ("gu", GU(protect_rank=None, include_mean=False, metric="euclidean")),
        ("graddiff", GradDiff(forget_weight=1.0, retain_weight=1.0)),
        ("ft", FineTune()),
        ("ng", NegativeGradient()),
        ("forget_only", ForgetOnly(directions=8)),
        ("llmu", LLMU(ascent_weight=0.5, mismatch_weight=1.0, normal_weight=1.0)),
        ("scrub", Scrub(scrub_max_epochs=2, scrub_kl_weight=0.5, scrub_task_weight=1.0)),
        ("ssd", SSD(ssd_alpha=10.0, ssd_lambda=1.0, fisher="sample")),
    ],
)
def test_defaults_are_those_of_the_paper(method: str, expected: BaseRule) -> None:
    """τ = 10⁻⁸, ε_q = 10⁻⁶, relaxed Jacobian, unit weights."""
    built = build_rule(method)
    assert built == expected
    assert type(built) is type(expected)


def test_every_method_is_covered_here() -> None:
    """A method added to the registry needs its tests."""
    assert sorted(METHODS) == sorted(
        (
            "rosu minmax uam uam_relaxed uam_reflected pcgrad pcgrad_conflict blur sam_npo orthograd gu graddiff ft ng"
            " forget_only llmu scrub ssd"
        ).split()
    )


def test_options_reach_the_rule() -> None:
    """Each option ends up where it belongs."""
    rosu = build_rule("rosu", jacobian="none", tau=0.5, tau_mode="relative", eps_q=0.25)
    assert rosu == Rosu(jacobian="none", tau=0.5, tau_mode="relative", eps_q=0.25)
    assert build_rule("minmax", jacobian="none", eps_q=0.25) == MinMax(jacobian="none", eps_q=0.25)
    assert build_rule("uam", eps_q=0.25) == Uam(eps_q=0.25)
    assert build_rule("uam_reflected", reflection=1.0) == UamReflected(reflection=1.0)
    weighted = {"forget_weight": 2.0, "retain_weight": 3.0, "eps_q": 0.25}
    assert build_rule("sam_npo", **weighted) == SharpnessAware(**weighted)
    weights = {"forget_weight": 2.0, "retain_weight": 3.0}
    for name, rule in (("pcgrad", PCGrad), ("pcgrad_conflict", PCGradConflict), ("blur", Blur), ("graddiff", GradDiff)):
        assert build_rule(name, **weights) == rule(**weights)
    assert build_rule("graddiff", forget_weight=2.0, retain_weight=3.0) == GradDiff(
        forget_weight=2.0, retain_weight=3.0
    )


def test_what_rosu_asks_of_the_engine() -> None:
    """f, then r, then a retain pass at w + δ, then amplification."""
    rule = build_rule("rosu")
    assert rule.passes == ("forget", "retain")
    assert rule.perturbs
    assert rule.pulls
