"""The orthogonality audit on problems whose gradients are known, against the definition in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rosu_llm.analysis.orthogonality import gradients
from rosu_llm.analysis.orthogonality.gradients import (
    PerSample,
    Recomputed,
    gram_matrix,
    load_matrix,
    sample_gradients,
    save_matrix,
)
from rosu_llm.analysis.orthogonality.pairs import PairError, cells, pair_error, summary
from rosu_llm.analysis.orthogonality.samples import AuditedSet, OrthogonalityPlan, default_sizes, draw_pair, usable
from rosu_llm.errors import ConfigError, DataError, NonFiniteError
from rosu_llm.space import LocalSpace

FORGET, RETAIN, WIDTH = 9, 23, 17


def quiet(*_: Any) -> None:
    pass


class Linear:
    """Sample i of a set has the summed loss ⟨x_i, w⟩ over t_i units: its gradient is x_i whatever w is."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        generator = np.random.default_rng(seed)
        common = generator.normal(size=WIDTH)
        self.units = {n: generator.integers(1, 9, c).astype(float) for n, c in (("forget", FORGET), ("retain", RETAIN))}
        self.rows = {
            name: (common + generator.normal(size=(len(t), WIDTH))) * t[:, None] for name, t in self.units.items()
        }
        # Two tensors, one of which no forget sample touches.
        self.weights = [nn.Parameter(torch.zeros(12, dtype=dtype)), nn.Parameter(torch.zeros(5, dtype=dtype))]
        self.rows["forget"][:, 12:] = 0.0
        self.dtype = dtype

    def sets(self) -> dict[str, AuditedSet]:
        def audited(name: str) -> AuditedSet:
            data = torch.from_numpy(self.rows[name]).to(self.dtype)

            def loss(numbers: Sequence[int]) -> Tensor:
                total = (data[list(numbers), :12] @ self.weights[0]).sum()
                return total if name == "forget" else total + (data[list(numbers), 12:] @ self.weights[1]).sum()

            return AuditedSet(self.units[name], loss)

        return {name: audited(name) for name in ("forget", "retain")}

    def gradient(self, name: str, numbers: Any) -> Any:
        """Sum of losses over the sum of units."""
        return self.rows[name][numbers].sum(0) / self.units[name][numbers].sum()

    def truth(self, forget: Any, retain: Any) -> tuple[float, float]:
        """|⟨g,u⟩| and ‖g − r‖ by definition."""
        g, f, r = (
            self.gradient("retain", range(RETAIN)),
            self.gradient("forget", forget),
            self.gradient("retain", retain),
        )
        q = f - (f @ r) / (r @ r) * r
        return abs(g @ q) / np.linalg.norm(q), float(np.linalg.norm(g - r))

    def source(self, route: str, micro_batch: int = 4) -> Any:
        space = LocalSpace(self.weights)
        if route == "recompute":
            recomputed = Recomputed(space, self.sets(), micro_batch=micro_batch)
            recomputed.stream_full(quiet)
            return recomputed
        matrix = gram_matrix(sample_gradients(space, self.sets(), quiet), quiet)
        return PerSample(matrix, self.units["forget"], self.units["retain"])


@pytest.mark.parametrize(("route", "micro_batch"), [("recompute", 1), ("recompute", 5), ("per_sample", 0)])
def test_both_routes_give_the_definition(route: str, micro_batch: int) -> None:
    problem = Linear()
    source = problem.source(route, micro_batch)
    assert source.full_norm == pytest.approx(np.linalg.norm(problem.gradient("retain", range(RETAIN))), rel=1e-13)
    for size in (1, 4, 22):
        for pair in range(20):
            drawn = draw_pair(0, pair, (FORGET, 3), (RETAIN, size))
            found = pair_error(source.gram(*drawn))
            error, bound = problem.truth(*drawn)
            assert found.error == pytest.approx(error, rel=1e-10, abs=1e-14)
            assert found.bound == pytest.approx(bound, rel=1e-10)


def test_float32_gradients_lose_no_more_than_float32() -> None:
    """The rows are rounded once; what follows is float64, also where f is nearly parallel to r."""
    problem = Linear(dtype=torch.float32)
    problem.rows["forget"][0] = 1e3 * problem.rows["retain"][0]
    problem.rows["forget"][0, 3] += 1.0
    truth = Linear()
    truth.units = problem.units
    truth.rows = {name: rows.astype(np.float32).astype(float) for name, rows in problem.rows.items()}
    truth.rows["forget"][:, 12:] = 0.0  # those weights are not in the forget loss
    problem.rows = truth.rows
    drawn = np.array([0]), np.array([0])
    found = pair_error(problem.source("per_sample").gram(*drawn))
    assert found.error == pytest.approx(truth.truth(*drawn)[0], rel=1e-9)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_a_batch(world: int) -> None:
    """Averaged over processes their gradients are the batch's, also where one is left without a sample."""
    problem = Linear()
    for retain in (np.array([4]), np.array([1, 5, 7, 20, 22])):
        parts = []
        for rank in range(world):
            space = LocalSpace(problem.weights)
            Recomputed(space, problem.sets(), micro_batch=2, rank=rank, world=world).capture_pair(
                np.array([2, 3]), retain
            )
            parts.append([torch.cat([t.reshape(-1) for t in space._captured[name]]).numpy() for name in ("f", "r")])
        mean = np.mean(parts, axis=0)
        np.testing.assert_allclose(mean[0], problem.gradient("forget", [2, 3]), rtol=1e-12)
        np.testing.assert_allclose(mean[1], problem.gradient("retain", retain), rtol=1e-12)


def test_pairs_reuse_the_memory_of_three_gradients() -> None:
    problem = Linear()
    space = LocalSpace(problem.weights)
    source = Recomputed(space, problem.sets(), micro_batch=4)
    source.stream_full(quiet)
    places = []
    for pair in range(3):
        source.gram(*draw_pair(0, pair, (FORGET, 3), (RETAIN, 4)))
        places.append({name: space._captured[name][0].data_ptr() for name in ("g", "f", "r")})
    assert places[0] == places[1] == places[2]
    assert space.held_bytes() == 3 * WIDTH * 8


@pytest.mark.parametrize("route", ["recompute", "per_sample"])
def test_the_bound_holds_in_every_sample_and_the_error_falls(route: str) -> None:
    source = Linear().source(route)
    count = 200 if route == "per_sample" else 50
    medians = []
    for size in (1, 3, 9, 20):
        found = [pair_error(source.gram(*draw_pair(1, k, (FORGET, 3), (RETAIN, size)))) for k in range(count)]
        assert all(pair.error is not None and pair.error <= pair.bound for pair in found)
        medians.append(np.median([pair.error for pair in found if pair.error is not None]))
    assert all(later < 0.75 * earlier for earlier, later in pairwise(medians))


@pytest.mark.parametrize("route", ["recompute", "per_sample"])
def test_the_whole_retain_set_as_a_batch_has_no_error(route: str) -> None:
    source = Linear().source(route)
    found = pair_error(source.gram(np.array([1, 2]), np.arange(RETAIN)))
    assert found.error is not None and found.error < 1e-13 * source.full_norm
    assert found.bound < 1e-13 * source.full_norm


@pytest.mark.parametrize("route", ["recompute", "per_sample"])
def test_degenerate_pairs_are_told_apart(route: str) -> None:
    problem = Linear()
    problem.rows["retain"][0] = 0.0
    problem.rows["forget"][1] = -3.0 * problem.rows["retain"][2]
    problem.rows["forget"][1, 12:] = problem.rows["retain"][2, 12:] = 0.0
    problem.rows["forget"][2] = 0.0
    source = problem.source(route)
    without = pair_error(source.gram(np.array([0]), np.array([0])))
    assert (without.error, without.degenerate) == (None, "retain")
    assert without.bound == pytest.approx(source.full_norm)
    for forget in (1, 2):
        parallel = pair_error(source.gram(np.array([forget]), np.array([2])))
        assert (parallel.error, parallel.degenerate) == (None, "direction")


@pytest.mark.parametrize("route", ["recompute", "per_sample"])
def test_broken_and_vanishing_gradients(route: str) -> None:
    problem = Linear()
    problem.rows["retain"][:] = 0.0
    with pytest.raises(DataError, match="full retain gradient is zero"):
        problem.source(route)
    problem.rows["retain"][3, 1] = np.nan
    with pytest.raises(NonFiniteError, match="norm of the full retain gradient is nan"):
        problem.source(route)
    problem = Linear()
    problem.rows["forget"][0, 0] = np.inf
    source = problem.source(route)
    with pytest.raises(NonFiniteError, match="The forget gradient of a pair has NaN"):
        pair_error(source.gram(np.array([0, 1]), np.array([2])))


def test_the_gram_matrix_is_float64_in_any_block_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    rows = torch.randn(13, 1000, generator=torch.Generator().manual_seed(0))
    truth = rows.double().numpy() @ rows.double().numpy().T
    for block in (13 * 8 * 7, 1 << 20):
        monkeypatch.setattr(gradients, "_BLOCK", block)
        matrix = gram_matrix(rows, quiet)
        np.testing.assert_allclose(matrix, truth, rtol=1e-12, atol=1e-11)
        assert (matrix == matrix.T).all()
    save_matrix(tmp_path / "k.safetensors", matrix, "here")
    found = load_matrix(tmp_path / "k.safetensors", "here")
    assert found is not None and (found == matrix).all()
    assert load_matrix(tmp_path / "k.safetensors", "elsewhere") is None
    (tmp_path / "k.safetensors").write_bytes(b"cut off")
    assert load_matrix(tmp_path / "k.safetensors", "here") is None


def test_batches_are_drawn_without_repetition_and_by_their_number_alone() -> None:
    forget, retain = draw_pair(7, 3, (FORGET, FORGET), (RETAIN, 20))
    assert sorted(forget) == list(range(FORGET)) and len(set(retain)) == 20
    again = draw_pair(7, 3, (FORGET, FORGET), (RETAIN, 20))
    assert (again[1] == retain).all()
    others = [draw_pair(*key, (FORGET, FORGET), (RETAIN, 20))[1] for key in ((7, 4), (8, 3))]
    assert all((other != retain).any() for other in others)
    counts = np.bincount(np.concatenate([draw_pair(0, k, (FORGET, 3), (RETAIN, 5))[1] for k in range(4600)]))
    assert abs(counts / 1000 - 1).max() < 0.15  # all equally often: 1000 expected, standard deviation 28


def test_a_plan_that_does_not_fit_is_refused() -> None:
    good = {"forget": 10, "retain": 50, "forget_batch": 4, "sizes": (8, 4, 8), "pairs": 5, "seed": 0}
    assert OrthogonalityPlan(**good).checked().sizes == (4, 8)  # type: ignore[arg-type]
    assert OrthogonalityPlan(**{**good, "sizes": ()}).checked().sizes == (4, 8, 16, 32)  # type: ignore[arg-type]
    assert default_sizes(3) == (3,) and default_sizes(4) == (4,) and default_sizes(64)[-1] == 64
    for change, message in (
        ({"sizes": (4, 51)}, "--batch-sizes 51 does not fit the retain set of 50 samples.*give 1 to 50"),
        ({"sizes": (0,)}, "--batch-sizes 0"),
        ({"forget_batch": 11}, "--forget-batch-size 11 does not fit the forget set of 10"),
        ({"pairs": 0}, "--pairs 0 must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            OrthogonalityPlan(**{**good, **change}).checked()  # type: ignore[arg-type]


def test_samples_without_a_unit_are_left_out() -> None:
    assert usable("retain", ["a", "b", "c"], [1.0, 0.0, 2.0]) == ["a", "c"]
    with pytest.raises(DataError, match="No forget sample has an answer token"):
        usable("forget", ["a"], [0.0])


def test_a_cell_counts_and_summarises() -> None:
    plan = OrthogonalityPlan(forget=10, retain=50, forget_batch=4, sizes=(8,), pairs=6, seed=0)
    found = [PairError(e, b) for e, b in ((0.1, 0.4), (0.2, 0.4), (0.3, 0.6), (0.9, 0.8))]
    found += [PairError(None, 1.0, "retain"), PairError(None, 1.0, "direction")]
    (cell,) = cells(plan, {(8, i): pair for i, pair in enumerate(found)}, full_norm=2.0)
    assert (cell["pairs"], cell["used"], cell["violations"]) == (6, 4, 1)
    assert cell["degenerate"] == {"retain": 1, "direction": 1}
    assert cell["absolute"]["median"] == pytest.approx(0.25) and cell["eps_orth"]["median"] == pytest.approx(0.125)
    assert cell["absolute_bound"]["max"] == 0.8 and cell["bound"]["max"] == 0.4
    assert cell["samples"]["eps_orth"] == [0.05, 0.1, 0.15, 0.45]
    (empty,) = cells(plan, {(8, i): found[-1] for i in range(6)}, full_norm=2.0)
    assert empty["eps_orth"] is None and empty["used"] == 0
    assert summary(np.arange(101.0)) == {
        **{"min": 0.0, "p5": 5.0, "p25": 25.0, "median": 50.0, "p75": 75.0, "p95": 95.0, "max": 100.0, "mean": 50.0}
    }
