"""Curves: thinning, gaps, and what is said about them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.presentation.blocks import Figure, Missing, shown
from rosu_llm.presentation.curves import read_curve
from rosu_llm.presentation.drawing import MOST, draw, thin
from rosu_llm.presentation.report.page import curves
from rosu_llm.presentation.report.reading import ReportedRun


def run(log: list[dict[str, Any]], label: str = "run") -> ReportedRun:
    return ReportedRun(label=label, folder=Path("run"), kind="rosu train", log=log)


def test_short_logs_are_kept_as_they_are() -> None:
    found = read_curve([{"step": 1, "loss": 3.0}, {"step": 2, "loss": 1.0}, {"step": 2, "train_runtime": 9.0}], "loss")
    assert found is not None
    assert (found.steps, found.values, found.merged, found.lost) == ((1, 2), (3.0, 1.0), 1, 0)


def test_long_logs_become_means_of_neighbours() -> None:
    count = 3 * MOST - 1  # 299 groups of three and one of two
    steps, values, merged = thin([(step, float(step)) for step in range(count)])
    assert merged == 3
    assert len(steps) == len(values) == MOST
    assert values[:2] == (1.0, 4.0)
    assert steps[0] == 2 and steps[-1] == count - 1
    assert values[-1] == count - 1.5
    assert thin([(step, float(step)) for step in range(count)], min)[1][:2] == (0.0, 3.0)
    assert thin([]) == ((), (), 0)


def test_a_spoiled_value_leaves_a_gap_and_is_counted() -> None:
    log = [{"step": step, "loss/forget": value} for step, value in enumerate([1.0, math.nan, math.inf, 2.0])]
    found = read_curve(log, "loss/forget")
    assert found is not None and found.lost == 2
    assert found.values[0] == 1.0 and math.isnan(found.values[1]) and math.isnan(found.values[2])
    section = curves([run(log)])
    said = [block.text for block in section.blocks if isinstance(block, Missing)]
    assert any("loss/forget was NaN or infinite in log entries of run (2)" in text for text in said)
    (figure,) = [block for block in section.blocks if isinstance(block, Figure)]
    assert figure.data.lines()[1] == ("1", "NaN")
    assert draw(figure).light.startswith("<?xml")


def test_nothing_but_nan_is_said_and_not_drawn() -> None:
    section = curves([run([{"step": 1, "loss": math.nan}])])
    assert not [block for block in section.blocks if isinstance(block, Figure)]
    assert any("loss was NaN" in block.text for block in section.blocks if isinstance(block, Missing))


@pytest.mark.parametrize("entry", [{"step": 1}, {"loss": 1.0}, {"step": 1, "loss": None}, {"step": 1, "loss": "x"}])
def test_odd_entries_are_no_curve(entry: dict[str, Any]) -> None:
    assert read_curve([entry], "loss") is None


def test_runs_are_drawn_together_with_their_data_behind() -> None:
    runs = [run([{"step": 1, "loss": 1.0}], "a"), run([{"step": 2, "loss": 5.0}], "b"), run([], "c")]
    section = curves(runs)
    (figure,) = [block for block in section.blocks if isinstance(block, Figure)]
    assert figure.data.headings == ("step", "a", "b")
    assert figure.data.lines() == (("1", "1", "–"), ("2", "–", "5"))
    assert any("c has no log" in block.text for block in section.blocks if isinstance(block, Missing))


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.123456, "0.1235"), (3, "3"), (math.nan, "NaN"), (-math.inf, "−∞"), (True, "True"), ("x", "x")],
)
def test_figures_in_tables(value: Any, text: str) -> None:
    assert shown(value) == text
