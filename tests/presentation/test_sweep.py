"""What is shown of a study: order, frontier, importance, the best recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from rosu_llm.errors import DataError
from rosu_llm.evaluation.tofu.summary import harmonic_mean
from rosu_llm.experiments.sweep.collect import collect, describe, importance, pareto
from rosu_llm.experiments.sweep.space import read_space
from rosu_llm.experiments.sweep.study import clear_conditions, open_study, pin_conditions
from rosu_llm.presentation.drawing import drawn
from rosu_llm.presentation.sweep import best_recipe, frontier_figure, level_curve, levels, sweep_table, write_sweep
from rosu_llm.recipes.settings import build, read_config
from tests.experiments.stand_in import Trainer
from tests.experiments.sweep.stand_in import StandIn, search

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
    describe(study, task, task.base, seed=3)
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
    written, missing = write_sweep(content, out)
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


def test_a_kept_adapter_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA runs leave no config.json."""

    def save(self: Trainer) -> None:
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")

    monkeypatch.setattr(Trainer, "save_model", save)
    task = StandIn()
    study, _ = search(tmp_path, task, 1)
    describe(study, task, task.base, seed=0)
    assert collect(study, tmp_path)["trials"][0]["model"] == "trials/0000"
    (tmp_path / "trials/0000/adapter_config.json").unlink()
    assert collect(study, tmp_path)["trials"][0]["model"] is None


def test_a_study_without_conditions_has_nothing_to_show(tmp_path: Path) -> None:
    study = open_study(None, "s", tmp_path, create=True)
    describe(study, StandIn(), StandIn.base, seed=0)
    pin_conditions(study, {})
    clear_conditions(study)
    with pytest.raises(DataError, match="has not run a trial"):
        collect(study, tmp_path)


def test_without_a_finished_trial_there_is_a_table_only(shown: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    content = {**shown[0], "trials": [], "best": None, "pareto": []}
    written, _ = write_sweep(content, tmp_path)
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


def test_curves_cross_the_plot_wherever_the_points_lie(shown: tuple[dict[str, Any], Path]) -> None:
    for centre, spread in ((0.5, 0.3), (0.95, 0.01), (0.03, 0.02), (1.1, 0.001)):
        content = json.loads(json.dumps({**shown[0], "references": {}}))
        for at, trial in enumerate(t for t in content["trials"] if t["state"] == "done"):
            trial["scores"] |= {"Mem": centre + spread * (-1) ** at, "Util": centre - spread * (-1) ** at}
        figure = frontier_figure(content)
        assert figure is not None
        with drawn(figure) as made:
            (axes,) = made.axes
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        seen = 0
        for line in axes.lines:
            if line.get_color() == "0.8":
                x, y = line.get_xdata(), line.get_ydata()
                seen += bool(np.any((x > left) & (x < right) & (y > bottom) & (y < top)))
        assert 2 <= seen <= 12
        assert len([text for text in axes.texts if 0 < float(text.get_text()) < 1.5]) == seen


def test_levels_are_round_and_between_the_corners() -> None:
    assert levels((0.85, 1.0), (0.9, 1.0)) == pytest.approx([0.88, 0.9, 0.92, 0.94, 0.96, 0.98])  # HM 0.874 … 1
    assert levels((-0.1, 1.0), (-0.1, 1.0)) == pytest.approx([0.2, 0.4, 0.6, 0.8])
