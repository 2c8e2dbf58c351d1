"""The demo at toy size runs every part; its recorded full-size result keeps its promise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.cli.main import main
from rosu_llm.errors import DataError
from rosu_llm.experiments.ablate.cells import plan, run_cells, selector
from rosu_llm.experiments.attempt import train_quietly
from rosu_llm.experiments.demo.task import (
    CONTENDERS,
    LABELS,
    SCHEDULE,
    DemoDocument,
    DemoTask,
    contenders_grid,
    demo_document,
)
from rosu_llm.experiments.demo.world import FULL, SMOKE, Size, build_world, measure, small_llama
from tests.experiments.stand_in import Silent

ROW = {"forget_prob", "forget_em", "retain_prob", "retain_em", "holdout_em", "mia_auc", "seconds"}
QUIET: Any = lambda *_: None
METHODS = ["before", "retain_only", *CONTENDERS]


def demo(out: Path, seeds: list[int], *methods: str, size: Size = SMOKE) -> DemoDocument:
    task = DemoTask(size, {**SCHEDULE, **size.overrides}, out / "models")
    cells, rows = plan(task, [contenders_grid(methods)], seeds)
    records = run_cells(cells, task, out, Silent())
    return demo_document(selector(rows, records), seeds, methods)


def test_the_command_writes_everything_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--smoke", "--out", str(tmp_path), "--seeds", "1"]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["method"] for row in results["rows"]] == METHODS
    assert all(set(row) >= ROW for row in results["rows"])
    assert [entry["seed"] for entry in results["per_seed"]] == [1]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("results.json", "table.md", "answers.md", "landing.png", "coupling.png")
    }
    assert list(results["logs"]) == list(CONTENDERS) and all("loss" in entry for entry in results["logs"]["rosu"])
    assert len(results["answers"]) == 6
    assert list(results["answers"][0]) == ["split", "question", "truth", "before", *CONTENDERS]
    for name in ("landing.png", "coupling.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "answers.md").read_text()
    assert all(LABELS[name] in text for name in CONTENDERS)
    assert "MIA AUC" in (tmp_path / "table.md").read_text()
    assert "gold" in capsys.readouterr().out


def test_averages_are_over_seeds(tmp_path: Path) -> None:
    document = demo(tmp_path, [0, 1], "graddiff")
    first, second = (entry["rows"][2]["forget_prob"] for entry in document["per_seed"])
    assert first != second
    assert document["rows"][2]["forget_prob"] == pytest.approx((first + second) / 2)


def test_the_same_seed_gives_the_same_rows(tmp_path: Path) -> None:
    first, second = (demo(tmp_path / name, [3], "rosu") for name in ("a", "b"))
    for a, b in zip(first["rows"], second["rows"], strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {k: v for k, v in b.items() if k != "seconds"}
    assert first["answers"] == second["answers"] and first["logs"] == second["logs"]


def test_a_comparison_that_lacks_a_row_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTENDERS, "graddiff", {"method": "rosu", "rho": -1.0})
    with pytest.raises(DataError, match=r"grad\. difference, seed 0, failed: rho=-1\.0 is no perturbation radius"):
        demo(tmp_path, [0], "graddiff")


def test_calibration_people_enter_no_figure() -> None:
    """Changing the calibration people's data changes no number of the row."""
    world = build_world(0, people=SMOKE.people)
    model = small_llama(len(world.tokenizer), 0, hidden=SMOKE.hidden, layers=SMOKE.layers)
    before = measure(model, world)
    world.data["calibration"] = world.data["retain"]
    assert measure(model, world) == before


@pytest.mark.slow
def test_the_small_preset_lands_at_the_level_of_unseen_people(tmp_path: Path) -> None:
    """One seed at full size: the forgotten are as little known as people the model never saw, the others as before.

    The gold model is not trained here; five seeds are compared with it in docs/demo.md. The limits are wider than what
    they showed, for kernels round differently and training from random weights turns that into other models.
    """
    task = DemoTask(FULL, SCHEDULE, tmp_path / "models")
    before = task.refer("before", 0, QUIET).measure()
    started = task.start({**task.base, **CONTENDERS["rosu_small"]}, 0, tmp_path / "run", QUIET)
    train_quietly(started.trainer, QUIET)
    after = started.measure()
    assert before["forget_em"] > 0.95  # there was something to forget
    assert abs(after["forget_em"] - after["holdout_em"]) < 0.12
    assert abs(after["mia_auc"] - 0.5) < 0.25
    assert after["retain_em"] >= before["retain_em"] - 0.02
    assert after["degenerate"] <= 0.1
