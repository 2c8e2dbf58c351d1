"""On quadratic losses every figure of a diagnosis equals its closed form."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import pytest

from rosu_llm import measure_coupling
from rosu_llm.analysis.coupling.pairs import CouplingPlan, PairWindows
from rosu_llm.presentation.measure_coupling import ShownDiagnosis
from rosu_llm.training.config import MethodArguments
from tests.analysis.quadratic import SIZE, Problem, collate, quadratic_losses, symmetric

RHOS = (0.1, 0.4, 0.8)
WIDE = (0.5, 2.0, 6.0)
EXACT = 1e-9  # float64, but a second-order part is a small difference of losses, and central differences divide by h²


def make(seed: int = 0, shift: float = 1.5, curvature: float = 0.3) -> Problem:
    """Forget and retain slopes share ``shift`` in every entry: the larger it is, the closer to parallel."""
    generator = np.random.default_rng(seed)
    return Problem(
        forget=generator.normal(size=(9, SIZE)) + shift,
        retain=generator.normal(size=(11, SIZE)) + shift,
        a=symmetric(generator, curvature),
        b=symmetric(generator, curvature),
        w=0.3 * generator.normal(size=SIZE),
    )


def measure(problem: Problem, **options: Any) -> ShownDiagnosis:
    plan = {"pairs": 5, "forget_batch_size": 3, "retain_batch_size": 4, "rhos": RHOS, "points": 4, **options}
    tau = plan.pop("tau", 1e-8)
    with quadratic_losses(problem) as (forget_loss, retain_loss):
        settings = MethodArguments(forget_loss=forget_loss, retain_loss=retain_loss, tau=tau)
        return measure_coupling(
            problem.model(),
            problem.samples("forget"),
            problem.samples("retain"),
            method_args=settings,
            collator=collate,
            progress=False,
            **plan,
        )


class Truth:
    """One pair by hand, τ included."""

    def __init__(self, problem: Problem, forget: list[int], retain: list[int], tau: float = 1e-8) -> None:
        self.problem = problem
        self.f, self.r = problem.gradients(forget, retain)
        self.q = self.f - (self.f @ self.r) / (self.r @ self.r + tau) * self.r
        self.cosine = self.f @ self.r / (np.linalg.norm(self.f) * np.linalg.norm(self.r))
        self.directions = {
            "standard": self.f / np.linalg.norm(self.f),
            "neutral": self.q / np.linalg.norm(self.q),
        }

    def curvature(self, name: str) -> float:
        u = self.directions[name]
        return float(u @ self.problem.b @ u)

    @property
    def bound(self) -> float:
        return max(abs(self.curvature(name)) for name in self.directions)

    @property
    def crossing(self) -> float:
        """ρ with ρ(s_std − s_rosu) + ½ρ²(h_std − h_rosu) = 0."""
        slope = self.r @ (self.directions["standard"] - self.directions["neutral"])
        return float(2.0 * slope / (self.curvature("neutral") - self.curvature("standard")))


def truths(problem: Problem, seed: int = 0, tau: float = 1e-8, pairs: int = 5) -> list[Truth]:
    plan = CouplingPlan(pairs=pairs, forget_batch_size=3, retain_batch_size=4, seed=seed)
    samples = {part: problem.samples(part) for part in ("forget", "retain")}
    draw = PairWindows(problem.model(), samples, {}, plan, collate, lambda batch: batch).draw
    return [Truth(problem, draw("forget", pair), draw("retain", pair), tau) for pair in range(1, pairs + 1)]


@pytest.mark.parametrize("tau", [1e-8, 0.5])
def test_norms_cosines_and_first_order_effects(tau: float) -> None:
    problem = make()
    found, expected = measure(problem, tau=tau), truths(problem, tau=tau)
    for record, truth in zip(found.records, expected, strict=True):
        assert record.cosine == pytest.approx(truth.cosine, rel=EXACT)
        assert record.sine == pytest.approx(sqrt(1 - truth.cosine**2), rel=EXACT)
        assert record.forget_norm == pytest.approx(np.linalg.norm(truth.f), rel=EXACT)
        assert record.retain_norm == pytest.approx(np.linalg.norm(truth.r), rel=EXACT)
        assert record.retain_square == pytest.approx(truth.r @ truth.r, rel=EXACT)
        assert record.q_norm == pytest.approx(np.linalg.norm(truth.q), rel=EXACT)
        assert record.residue == pytest.approx(tau / (truth.r @ truth.r + tau), rel=EXACT)
        for name, u in truth.directions.items():
            ray = getattr(record, name)
            assert ray.retain_slope == pytest.approx(truth.r @ u, rel=EXACT, abs=1e-12)
            assert ray.forget_slope == pytest.approx(truth.f @ u, rel=EXACT)
            assert ray.realized == pytest.approx(1.0, abs=1e-9)


def test_realised_changes_and_second_order_parts() -> None:
    problem = make(seed=1)
    found, expected = measure(problem), truths(problem)
    for row in found.document["at_rho"]:
        rho = row["rho"]
        for name in ("standard", "neutral"):
            for loss, gradient, hessian, key in (
                ("retain", "r", problem.b, "retain_change"),
                ("forget", "f", problem.a, "forget_gain"),
            ):
                u = [truth.directions[name] for truth in expected]
                first = np.mean([rho * getattr(t, gradient) @ x for t, x in zip(expected, u, strict=True)])
                second = np.mean([0.5 * rho**2 * x @ hessian @ x for x in u])
                assert row[name][f"{loss}_first_order"] == pytest.approx(first, rel=EXACT, abs=1e-10)
                assert row[name][f"{loss}_second_order"] == pytest.approx(second, rel=1e-8)
                assert row[name][key] == pytest.approx(first + second, rel=EXACT, abs=1e-12)
        gap = row["standard"]["retain_change"] - row["neutral"]["retain_change"]
        assert row["retain_gap"]["mean"] == pytest.approx(gap, rel=EXACT)


def test_curvature_guaranteed_radius_and_crossing() -> None:
    """In pairs whose curvature favours the standard perturbation, the curves cross where arithmetic says."""
    problem = make(seed=7, shift=0.4, curvature=0.5)
    found, expected = measure(problem, rhos=WIDE, points=8, pairs=12), truths(problem, pairs=12)
    crossed = 0
    for pair, truth in zip(found.document["per_pair"], expected, strict=True):
        assert pair["curvature_standard"] == pytest.approx(truth.curvature("standard"), rel=1e-8)
        assert pair["curvature_neutral"] == pytest.approx(truth.curvature("neutral"), rel=1e-8)
        assert pair["curvature_bound"] == pytest.approx(truth.bound, rel=1e-6)
        if truth.cosine <= 0.0:
            assert pair["guaranteed_rho"] is None and pair["crossing_rho"] is None
            continue
        radius = np.linalg.norm(truth.r) * truth.cosine / truth.bound
        assert pair["guaranteed_rho"] == pytest.approx(radius, rel=1e-6)
        if 0.0 < truth.crossing <= WIDE[-1]:
            crossed += 1
            assert pair["crossing_rho"] == pytest.approx(truth.crossing, rel=1e-6)
            assert pair["crossing_rho"] >= pair["guaranteed_rho"] * (1 - 1e-6)  # the guarantee never ends too late
        else:
            assert pair["crossing_rho"] is None
    positive = [truth for truth in expected if truth.cosine > 0.0]
    assert 2 <= crossed < len(positive) < 12  # else this test would not show all cases
    assert found.document["radius"]["crossed_share"] == pytest.approx(crossed / len(positive))


def test_the_condition_of_the_corollary_pair_by_pair() -> None:
    problem = make(seed=7, shift=0.4, curvature=0.5)
    found, expected = measure(problem, rhos=WIDE, pairs=12), truths(problem, pairs=12)
    shares = []
    for row in found.document["at_rho"]:
        holds = [t.cosine > t.bound * row["rho"] / np.linalg.norm(t.r) for t in expected]
        ahead = [
            row["rho"] * t.r @ (t.directions["standard"] - t.directions["neutral"])
            > 0.5 * row["rho"] ** 2 * (t.curvature("neutral") - t.curvature("standard"))
            for t in expected
        ]
        assert row["condition_share"] == pytest.approx(np.mean(holds))
        assert row["advantage_share"] == pytest.approx(np.mean(ahead))
        assert all(b or not a for a, b in zip(holds, ahead, strict=True))  # Corollary: the condition suffices
        shares.append(row["condition_share"])
    assert shares[0] > shares[-1]


def test_parts_have_their_own_coupling_and_add_up() -> None:
    problem = make(seed=2)
    found, expected = measure(problem), truths(problem)
    where = {
        (None, "embedding"): slice(0, 4),
        (0, "q"): slice(4, 6),
        (0, "down"): slice(6, 8),
        (1, "q"): slice(8, 10),
        (1, "down"): slice(10, 12),
    }
    rows = {(row["layer"], row["kind"]): row for row in found.document["by_part"]}
    assert set(rows) == set(where)
    for key, at in where.items():
        cosines = [t.f[at] @ t.r[at] / (np.linalg.norm(t.f[at]) * np.linalg.norm(t.r[at])) for t in expected]
        shares = [t.f[at] @ t.f[at] / (t.f @ t.f) for t in expected]
        assert rows[key]["cosine"] == pytest.approx(np.mean(cosines), rel=EXACT)
        assert rows[key]["cosine_std"] == pytest.approx(np.std(cosines, ddof=1), rel=1e-7)
        assert rows[key]["forget_share"] == pytest.approx(np.mean(shares), rel=EXACT)
        assert rows[key]["parameters"] == at.stop - at.start
    q = [
        np.r_[t.f[4:6], t.f[8:10]] @ np.r_[t.r[4:6], t.r[8:10]]
        / np.linalg.norm(np.r_[t.f[4:6], t.f[8:10]]) / np.linalg.norm(np.r_[t.r[4:6], t.r[8:10]])
        for t in expected
    ]  # fmt: skip
    (kind,) = [row for row in found.document["by_kind"] if row["kind"] == "q"]
    assert kind["cosine"] == pytest.approx(np.mean(q), rel=EXACT)
    (layer,) = [row for row in found.document["by_layer"] if row["layer"] == 1]
    assert layer["parameters"] == 4
    for grouping in ("by_part", "by_kind", "by_layer"):
        for key in ("forget_share", "retain_share"):
            assert sum(row[key] for row in found.document[grouping]) == pytest.approx(1.0)
        total = sum(row["contribution"] for row in found.document[grouping])
        assert total == pytest.approx(found.document["coupling"]["cosine"]["mean"], rel=EXACT)


def test_statistics_over_pairs_are_numpys() -> None:
    problem = make()
    found, expected = measure(problem), truths(problem)
    cosines = [truth.cosine for truth in expected]
    stat = found.document["coupling"]["cosine"]
    assert stat["mean"] == pytest.approx(np.mean(cosines))
    assert stat["std"] == pytest.approx(np.std(cosines, ddof=1))
    assert stat["q05"] == pytest.approx(np.quantile(cosines, 0.05))
    assert stat["median"] == pytest.approx(np.median(cosines))
    counts = found.document["coupling"]["histogram"]["counts"]
    assert counts == np.histogram(cosines, bins=20, range=(-1, 1))[0].tolist()
    assert sum(counts) == 5


def test_micro_batches_change_nothing_and_seeds_do() -> None:
    problem = make()
    whole, split, other = measure(problem), measure(problem, micro_batch_size=2), measure(problem, seed=1)
    for a, b in zip(whole.records, split.records, strict=True):
        assert b.cosine == pytest.approx(a.cosine, rel=1e-12)
        assert b.neutral is not None and a.neutral is not None
        assert b.neutral.retain == pytest.approx(a.neutral.retain, rel=1e-9)
    assert other.records[0].cosine != pytest.approx(whole.records[0].cosine, rel=1e-3)
