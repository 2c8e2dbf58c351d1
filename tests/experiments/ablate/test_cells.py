"""Every cell once; a failing one is marked; what is finished stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.errors import ConfigError
from rosu_llm.experiments.ablate.cells import plan, run_cells, selector
from rosu_llm.experiments.ablate.grid import Grid, free_grid, named_grid
from rosu_llm.experiments.config_task import known_settings
from tests.experiments.ablate.stand_in import StandIn
from tests.experiments.stand_in import Silent


def axis(*values: float) -> Grid:
    return free_grid([f"rho={','.join(map(str, values))}"], {}, {})


def go(task: StandIn, out: Path, grids: list[Grid], seeds: list[int], **options: Any) -> Any:
    cells, rows = plan(task, grids, seeds)
    observer = Silent()
    records = run_cells(cells, task, out, observer, **options)
    return selector(rows, records), observer


def figures(values: Any, seed: int) -> dict[str, float]:
    if values["rho"] == 0.3:
        raise ConfigError("rho=0.3\nis cursed.")
    return {"forget_em": values["rho"], "retain_em": float(seed)}


def test_a_second_run_runs_nothing(tmp_path: Path) -> None:
    task = StandIn(figures, references={"before": "before"})
    select, observer = go(task, tmp_path, [axis(0.1, 0.2)], [5, 6])
    assert task.calls == [("before", 5), (0.1, 5), (0.2, 5), ("before", 6), (0.1, 6), (0.2, 6)]
    assert select("axes", "ρ = 0.2")[6].metrics == {"forget_em": 0.2, "retain_em": 6.0}
    assert observer.ends == ["done"] * 6 and observer.labels[:2] == ["before, seed 5", "axes: ρ = 0.1, seed 5"]
    task.calls.clear()
    select, observer = go(task, tmp_path, [axis(0.1, 0.2)], [5, 6])
    assert task.calls == []
    assert observer.ends == ["kept"] * 6 and not observer.labels
    assert select("axes", "ρ = 0.2")[6].metrics == {"forget_em": 0.2, "retain_em": 6.0}


def test_only_what_is_new_or_changed_is_run(tmp_path: Path) -> None:
    task = StandIn(figures)
    go(task, tmp_path, [axis(0.1, 0.2)], [0])
    task.calls.clear()
    go(task, tmp_path, [axis(0.1, 0.25, 0.2)], [0, 1])
    assert task.calls == [(0.25, 0), (0.1, 1), (0.25, 1), (0.2, 1)]
    for change in ({"content": "two"}, {"base": {"method": "rosu", "kappa": 0.6}}):
        task.calls.clear()
        vars(task).update(change)
        go(task, tmp_path, [axis(0.1)], [0])
        assert task.calls == [(0.1, 0)]


def test_rows_with_the_same_settings_share_a_cell(tmp_path: Path) -> None:
    task = StandIn(figures, rho=0.4)
    known = known_settings(task.base)
    grids = [named_grid(name, task.base, known) for name in ("rho", "retain_batch", "jacobian")]
    select, _ = go(task, tmp_path, grids, [0])
    assert len(task.calls) == 7 + 4 + 5 - 2  # ρ = 0.4 stands in all three
    assert select("rho", "ρ = 0.4")[0] is select("jacobian", "ROSU (relaxed)")[0]


def test_a_failed_cell_is_marked_and_the_others_go_on(tmp_path: Path) -> None:
    task = StandIn(figures)
    select, observer = go(task, tmp_path, [axis(0.1, 0.3, 0.5)], [0])
    assert observer.ends == ["done", "failed", "done"] and observer.texts[1].endswith(" s  rho=0.3 is cursed.")
    record = select("axes", "ρ = 0.3")[0]
    assert record.error == "rho=0.3 is cursed."
    assert json.loads((tmp_path / "cells" / f"{record.key}.json").read_text())["status"] == "failed"
    task.calls.clear()
    go(task, tmp_path, [axis(0.1, 0.3, 0.5)], [0])
    assert task.calls == []
    go(task, tmp_path, [axis(0.1, 0.3, 0.5)], [0], retry_failed=True)
    assert task.calls == [(0.3, 0)]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError(), ZeroDivisionError("x")])
def test_errors_of_others_name_their_kind(tmp_path: Path, error: Exception) -> None:
    def fail(values: Any, seed: int) -> dict[str, float]:
        raise error

    select, _ = go(StandIn(fail), tmp_path, [axis(0.1)], [0])
    assert select("axes", "ρ = 0.1")[0].error == f"{type(error).__name__}: {error}"
    assert not [*(tmp_path / "models").glob("*")]


def test_a_model_that_measures_nan_has_failed(tmp_path: Path) -> None:
    select, _ = go(StandIn(lambda values, seed: {"forget_em": float("nan")}), tmp_path, [axis(0.1)], [0])
    record = select("axes", "ρ = 0.1")[0]
    assert record.status == "failed" and "forget_em is not finite" in record.error
    assert record.metrics == {}


def test_an_interrupt_leaves_what_is_finished(tmp_path: Path) -> None:
    def interrupted(values: Any, seed: int) -> dict[str, float]:
        if values["rho"] == 0.2:
            raise KeyboardInterrupt
        return {"forget_em": 0.0}

    task = StandIn(interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(task, tmp_path, [axis(0.1, 0.2, 0.3)], [0])
    assert len([*(tmp_path / "cells").iterdir()]) == 1
    task.figures = lambda values, seed: {"forget_em": 0.0}
    task.calls.clear()
    go(task, tmp_path, [axis(0.1, 0.2, 0.3)], [0])
    assert task.calls == [(0.2, 0), (0.3, 0)]


def test_models_are_kept_only_when_asked_for(tmp_path: Path) -> None:
    task = StandIn(figures)
    go(task, tmp_path, [axis(0.1)], [0])
    assert not [*(tmp_path / "models").glob("*")]
    for _ in range(2):  # not kept the first time, so run again; then kept
        select, _ = go(task, tmp_path, [axis(0.1)], [0], keep_models=True)
        assert (tmp_path / select("axes", "ρ = 0.1")[0].model / "config.json").is_file()
    assert len(task.calls) == 2
    go(task, tmp_path, [axis(0.1)], [0])
    assert len(task.calls) == 2


def test_a_record_keeps_the_log_and_the_answers_of_its_task(tmp_path: Path) -> None:
    task = StandIn(figures)
    log, answers = [{"loss": 0.5, "step": 1.0}], [{"question": "q", "answer": "a"}]
    task.details = lambda: {"log": log, "answers": answers}
    for _ in range(2):  # run, then read
        select, _ = go(task, tmp_path, [axis(0.1)], [0])
        record = select("axes", "ρ = 0.1")[0]
        assert (record.log, record.answers) == (log, answers)
        assert 0 < record.training_seconds <= record.seconds + 0.01
