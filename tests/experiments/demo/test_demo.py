"""The demo at toy size runs every part; its recorded full-size result keeps its promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rosu_llm.cli.main import main
from rosu_llm.errors import DataError
from rosu_llm.experiments.ablate.cells import plan, run_cells, selector
from rosu_llm.experiments.demo.task import CONTENDERS, LABELS, DemoDocument, DemoTask, contenders_grid, demo_document
from rosu_llm.experiments.demo.world import FULL, SMOKE, Size, build_world, measure, small_llama
from tests.experiments.stand_in import Silent

ROW = {"forget_prob", "forget_em", "retain_prob", "retain_em", "holdout_em", "mia_auc", "seconds"}
METHODS = ["before", "retain_only", *CONTENDERS]


def demo(out: Path, seeds: list[int], *methods: str, size: Size = SMOKE) -> DemoDocument:
    task = DemoTask(size, {}, out / "models")
    cells, rows = plan(task, [contenders_grid(methods)], seeds)
    records = run_cells(cells, task, out, Silent())
    return demo_document(selector(rows, records), seeds, methods)


def test_the_command_writes_everything_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--smoke", "--out", str(tmp_path), "--seeds", "0", "1"]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["method"] for row in results["rows"]] == METHODS
    assert all(set(row) >= ROW for row in results["rows"])
    assert [entry["seed"] for entry in results["per_seed"]] == [0, 1]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("results.json", "table.md", "answers.md", "frontier.png", "coupling.png")
    }
    assert list(results["logs"]) == list(CONTENDERS) and all("loss" in entry for entry in results["logs"]["rosu"])
    assert len(results["answers"]) == 6
    assert list(results["answers"][0]) == ["split", "question", "truth", "before", *CONTENDERS]
    for name in ("frontier.png", "coupling.png"):
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
def test_rosu_forgets_and_keeps(tmp_path: Path) -> None:
    """One seed at full size: down to the level of a model that never saw the ten, without loss elsewhere.

    Forget EM at most the gold model's + 0.1, retain EM at least the start − 0.05. Kernels round differently, and
    training from random weights turns that into other models: the same code and seed 0 gave 0.646 against 0.630 with
    AVX2, 0.675 against 0.619 with AVX-512 and 0.647 against 0.618 with neither. Over eight runs (AVX2 seeds 0 to 2,
    AVX-512 seeds 0 to 3, neither seed 0) the calibrated run lay 0.010 to 0.057 above the gold model, 0.027 in the mean
    with a standard deviation of 0.016. A model that only goes on learning what is to be kept lies 0.25 above it.
    """
    document = demo(tmp_path, [0], "rosu", "rosu_calibrated", size=FULL)
    rows = {row["method"]: row for row in document["rows"]}
    for name in ("rosu", "rosu_calibrated"):
        assert rows[name]["forget_em"] <= rows["retain_only"]["forget_em"] + 0.1
        assert rows[name]["retain_em"] >= rows["before"]["retain_em"] - 0.05
    assert rows["before"]["forget_em"] > 0.95  # there was something to forget
    # calibrated, the attack is closer to a coin toss than uncalibrated
    assert abs(rows["rosu_calibrated"]["mia_auc"] - 0.5) < abs(rows["rosu"]["mia_auc"] - 0.5)
