"""The two terms of the update alone: βδ (delta_only) and −ηv (v_only), and what cannot be asked of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from rosu_llm import UnlearningStep
from rosu_llm.errors import ConfigError
from rosu_llm.geometry import Rosu, Vector, build_rule
from rosu_llm.step.pull import resolve

from .problems import dense, gram_of

VECTORS = {
    "f": np.array([1.0, 2.0, -1.0]),
    "r": np.array([0.5, -1.0, 2.0]),
    "s": np.array([-1.0, 0.25, 3.0]),
}


def test_the_inner_problem_is_the_same_for_all() -> None:
    gram = gram_of({name: VECTORS[name] for name in ("f", "r")})
    deltas = [dense(Rosu(components=c).inner(gram, 0.3).delta, VECTORS) for c in ("full", "delta_only", "v_only")]
    assert np.array_equal(deltas[0], deltas[1]) and np.array_equal(deltas[0], deltas[2])


def test_each_component_keeps_its_term() -> None:
    gram = gram_of(VECTORS)
    inner = Rosu().inner(gram, 0.3)
    full = dense(Rosu().outer(gram, inner), VECTORS)
    assert np.array_equal(dense(Rosu(components="v_only").outer(gram, inner), VECTORS), full)
    assert not Rosu(components="v_only").pulls
    assert Rosu(components="delta_only").outer(gram, inner) == Vector()
    assert Rosu(components="delta_only").pulls
    assert Rosu().pulls


def test_a_degenerate_step_of_delta_alone_does_nothing() -> None:
    parallel = {"f": VECTORS["r"] * 2, "r": VECTORS["r"]}
    gram = gram_of(parallel)
    rule = Rosu(components="delta_only")
    inner = rule.inner(gram, 0.3)
    assert inner.fallback
    assert rule.outer(gram, inner) == Vector()
    assert dense(Rosu(components="v_only").outer(gram, inner), parallel) == pytest.approx(VECTORS["r"])


def test_unknown_components_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'delta_only'"):
        build_rule("rosu", components="delta")


def test_delta_alone_has_no_step_to_match() -> None:
    with pytest.raises(ConfigError, match=r"components='delta_only' takes none.*amplify='optimizer'"):
        resolve("matched", "tied", 0.5, alone=True)
    weight = nn.Parameter(torch.zeros(2))
    assert resolve("auto", "tied", 0.5, torch.optim.AdamW([weight]), alone=True).mode == "optimizer"
    assert resolve("auto", "tied", 0.5, torch.optim.AdamW([weight])).mode == "matched"
    assert resolve("auto", "tied", 0.5, torch.optim.SGD([weight], lr=0.1), alone=True).mode == "direct"
    assert resolve("auto", 0.2, 0.5, torch.optim.AdamW([weight]), alone=True).mode == "direct"


@pytest.mark.parametrize("amplify", ["direct", "optimizer"])
@pytest.mark.parametrize("components", ["full", "delta_only", "v_only"])
def test_with_sgd_the_weights_move_by_the_named_terms(components: str, amplify: str) -> None:
    """Quadratic losses in two dimensions: f, r and s in closed form."""
    start, goal_f, goal_r = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]), torch.tensor([3.0, -1.0])
    model = nn.ParameterList([nn.Parameter(start.clone())])
    w, eta, rho = model[0], 0.1, 0.5
    step = UnlearningStep(
        model, torch.optim.SGD([w], lr=eta), rho=rho, components=components, amplify=amplify, tau=1e-8
    )
    step(lambda: 0.5 * (w - goal_f).square().sum(), lambda: 0.5 * (w - goal_r).square().sum())
    f, r = (start - goal_f).double(), (start - goal_r).double()
    q = f - (f @ r) / (r @ r + 1e-8) * r
    u = q / q.norm()
    s = r + rho * u
    v = s + rho / q.norm() * (s - (r @ s) / (r @ r + 1e-8) * r - (u @ s) * u)
    pull, descent = eta / rho * rho * u, -eta * v
    moved = {"full": pull + descent, "delta_only": pull, "v_only": descent}[components]
    assert torch.allclose(w.detach().double(), start.double() + moved, atol=1e-6)
