"""What is drawn are the means and deviations, on the axis that suits the values."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from rosu_llm.experiments.ablate.grid import free_grid, named_grid
from rosu_llm.presentation import drawing
from rosu_llm.presentation.ablation import grid_section, lines, numeric_axes
from tests.experiments.ablate.stand_in import StandIn, done, failed

TASK = StandIn(None, references={"before": "before", "gold": "gold"})


def test_numeric_axes_with_at_least_two_values_are_drawn() -> None:
    grid = free_grid(["rho=0.1,0.2", "method=rosu,uam", "kappa=0.5", "upcast=true,false"], {}, {})
    assert numeric_axes(grid) == ["rho"]
    assert numeric_axes(named_grid("methods", {}, {"method"})) == []


@pytest.mark.parametrize(
    ("values", "log"), [([1, 2, 4, 8], True), ([0.2, 0.5], False), ([0, 10], False), ([1e-5, 1e-3], True)]
)
def test_wide_ranges_are_logarithmic(values: list[float], log: bool) -> None:
    assert drawing.is_log(values) is log


def test_small_differences_do_not_look_large() -> None:
    assert drawing.widened(0.0, 1.0) == (0.0, 1.0)
    assert drawing.widened(0.8, 1.0) == (0.8, 1.0)
    low, high = drawing.widened(0.99, 1.0)
    assert high - low == pytest.approx(0.1) and 1.0 < high < 1.01


def test_one_line_for_each_combination_of_the_other_axes_in_order() -> None:
    grid = free_grid(["rho=0.4,0.1", "method=rosu,uam"], {}, {})
    found = lines(grid, "rho")
    assert {name: [v.settings["rho"] for v in line] for name, line in found.items()} == {
        "method = rosu": [0.1, 0.4],
        "method = uam": [0.1, 0.4],
    }


def test_the_figure_shows_means_bands_gaps_and_levels() -> None:
    grid = free_grid(["retain_per_forget=1,2,8"], {}, {})
    cells = {
        "retain_per_forget = 1": {0: done(0, forget_em=0.1, retain_em=1.0), 1: done(1, forget_em=0.3, retain_em=1.0)},
        "retain_per_forget = 2": {0: failed(0, "x"), 1: failed(1, "x")},
        "retain_per_forget = 8": {0: done(0, forget_em=0.5, retain_em=0.9), 1: done(1, forget_em=0.5, retain_em=0.7)},
        "before": {0: done(0, forget_em=1.0, retain_em=0.95)},
        "gold": {0: done(0, forget_em=0.2, retain_em=0.9)},
    }
    (figure,) = grid_section(grid, TASK, lambda name, label: cells[label], [0, 1]).figures
    assert figure.key == "axes_retain_per_forget"
    assert drawing.png(figure).startswith(b"\x89PNG")
    with drawing.drawn(figure) as made:
        _, forget = made.axes
    assert forget.get_xscale() == "log"
    line, before, gold = forget.get_lines()
    assert line.get_xdata().tolist() == [1.0, 8.0]
    assert line.get_ydata().tolist() == pytest.approx([0.2, 0.5])
    assert (before.get_ydata()[0], gold.get_ydata()[0]) == (1.0, 0.2)
    band = forget.collections[0].get_paths()[0].vertices
    deviation = 0.1 * 2**0.5  # of 0.1 and 0.3, with n − 1
    assert band[:, 1].min() == pytest.approx(0.2 - deviation)
    assert sorted({round(y, 6) for x, y in band if x == 1.0}) == pytest.approx([0.2 - deviation, 0.2 + deviation], 1e-5)
