"""What is shown of a study: order, frontier, importance, the best recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from rosu_llm.evaluation.aggregates import harmonic_mean
from rosu_llm.sweep.collect import collect, describe, importance, pareto
from rosu_llm.sweep.plots import level_curve
from rosu_llm.sweep.present import best_recipe, write
from rosu_llm.sweep.space import read_space
from rosu_llm.sweep.table import sweep_table
from rosu_llm.training.recipe import build, read_config
from tests.sweep.stand_in import StandIn, search

SPACE = read_space(None, ["rho=0.1,0.3,0.45,0.8", "num_train_epochs=1,2"], StandIn.base)


def failing(values: Any) -> dict[str, float]:
    if values["rho"] == 0.3:
        raise RuntimeError("out of memory")
    return {"mem": 1 - values["rho"], "util": values["rho"]}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Eight trials: ρ matters, the number of epochs does not, and two fail."""
    out, task = tmp_path_factory.mktemp("sweep"), StandIn(failing)
    study, _ = search(out, task, 8, sampler="grid", space=SPACE)
    describe(study, task, seed=3)
    return collect(study, out), out


def test_trials_are_ranked_by_agg_mu(shown: tuple[dict[str, Any], Path]) -> None:
    content, _ = shown
    ranked = sorted((t for t in content["trials"] if t["rank"]), key=lambda t: t["rank"])
    assert [t["settings"]["rho"] for t in ranked] == [0.45, 0.45, 0.8, 0.8, 0.1, 0.1]  # 0.495, 0.32, 0.18
    assert content["best"] == ranked[0]["number"] < ranked[1]["number"]
    assert {t["state"] for t in content["trials"] if not t["rank"]} == {"failed"}
    assert {t["error"] for t in content["trials"]} == {None, "RuntimeError: out of memory"}
    assert content["schema"] == "rosu/sweep/1" and content["seed"] == 3
    json.dumps(content, allow_nan=False)


def test_the_table_has_every_trial_with_reasons(shown: tuple[dict[str, Any], Path]) -> None:
    table = sweep_table(shown[0])
    assert table.columns == (
        "rank",
        "rho",
        "num_train_epochs",
        "Agg_MU",
        "Mem",
        "Util",
        "Priv",
        "Agg",
        "state",
        "seconds",
    )
    initial, first, *_, last = table.rows
    assert initial.reference and initial.cells[3].value == 0.0
    assert [cell.text for cell in first.cells[:2]] == ["1", "0.45"]
    assert first.cells[3].value == pytest.approx(0.495) and first.cells[4].value == pytest.approx(0.55)
    assert last.cells[-2].text == "failed" and last.cells[-2].footnote == 1 and last.cells[3].value is None
    assert table.footnotes == ("RuntimeError: out of memory",)
    assert table.notes[:2] == ("Ranked by Agg_MU alone. Trials: " + _counts(shown[0]) + ".", "invented")


def _counts(content: dict[str, Any]) -> str:
    first = content["trials"][0]["state"]
    return ", ".join(f"{6 if state == 'done' else 2} {state}" for state in (first, *({"done", "failed"} - {first})))


def test_files_are_written_and_the_best_recipe_builds(shown: tuple[dict[str, Any], Path]) -> None:
    content, out = shown
    written, missing = write(content, sweep_table(content), out)
    assert missing is None
    assert {path.name for path in written} == {
        *("trials.json", "table.md", "table.tex", "table.json", "best.yaml", "frontier.png")
    }
    assert json.loads((out / "trials.json").read_text()) == json.loads(json.dumps(content))
    assert (out / "frontier.png").read_bytes().startswith(b"\x89PNG")
    values = read_config(out / "best.yaml")
    assert values["rho"] == 0.45 and values["seed"] == 3 and values["output_dir"] == str(out / "best")
    _, config = build(values)
    assert (config.rho, config.learning_rate) == (0.45, 1e-3)
    assert "add model_name_or_path" in best_recipe(content, out)


def test_without_a_finished_trial_there_is_a_table_only(shown: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    content = {**shown[0], "trials": [], "best": None, "pareto": []}
    written, _ = write(content, sweep_table(content), tmp_path)
    assert {path.suffix for path in written} == {".json", ".md", ".tex"}


def test_importance_finds_the_setting_that_matters() -> None:
    space = read_space(None, ["rho=0.05..0.45", "weight_decay=0.0..1.0"], StandIn.base)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(lambda trial: space.suggest(trial)["rho"], n_trials=30)
    shares = importance(study, 30)
    assert shares is not None and sum(shares.values()) == pytest.approx(1.0) and shares["rho"] > 0.9
    assert importance(study, 7) is None


def test_the_frontier_is_what_nothing_beats() -> None:
    points = [(0.1, 0.9), (0.5, 0.5), (0.4, 0.5), (0.5, 0.4), (0.9, 0.1), (0.5, 0.5), (0.0, 0.0)]
    records = [{"number": at, "scores": {"Mem": m, "Util": u}} for at, (m, u) in enumerate(points)]
    assert pareto(records) == [0, 1, 4, 5]  # equal ones do not beat each other


def test_level_curves_have_the_harmonic_mean_they_say() -> None:
    for level in (0.1, 0.5, 0.9):
        for x in np.linspace(level / 2 + 0.01, 1.2, 7):
            assert harmonic_mean((float(x), float(level_curve(level, x)))) == pytest.approx(level)
