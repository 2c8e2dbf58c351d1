"""Trials with a stand-in for model and data: what selects, what prunes, what is kept, what is recorded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest

from rosu_llm.experiments.sweep.sampler import grid_size, make_sampler
from rosu_llm.experiments.sweep.search import trial_folder
from rosu_llm.experiments.sweep.space import read_space
from rosu_llm.experiments.sweep.study import open_study
from tests.experiments.stand_in import STEPS, Silent
from tests.experiments.sweep.stand_in import StandIn, rhos, search, states

GRID = read_space(None, ["rho=0.3,0.45,0.8"], StandIn.base)


def by_rho(study: Any) -> dict[float, Any]:
    return {trial.params["rho"]: trial for trial in study.get_trials(deepcopy=False)}


def test_agg_mu_alone_is_the_value_and_everything_is_recorded(tmp_path: Path) -> None:
    study, stopped = search(tmp_path, StandIn(), 3, sampler="grid", space=GRID)
    assert stopped is None and states(study) == ["COMPLETE"] * 3
    for rho, trial in by_rho(study).items():
        assert trial.value == pytest.approx(2 * rho * (1 - rho))  # HM(ρ, 1 − ρ)
        assert trial.user_attrs["scores"]["Priv"] == pytest.approx(rho**2)
        assert trial.user_attrs["figures"] == pytest.approx({"mem": 1 - rho, "util": rho})
    # Agg and Priv prefer others, so that a search which looked at them would end elsewhere.
    trials = by_rho(study)
    assert study.best_trial.params["rho"] == 0.45
    assert max(trials, key=lambda rho: trials[rho].user_attrs["scores"]["Agg"]) == 0.8
    assert max(trials, key=lambda rho: trials[rho].user_attrs["scores"]["Priv"]) == 0.8


def test_trials_count_for_the_whole_study_and_references_are_measured_once(tmp_path: Path) -> None:
    task, other = StandIn(), StandIn()
    search(tmp_path, task, 2)
    search(tmp_path, other, 5)
    study, _ = search(tmp_path, other, 5)
    assert (len(task.trainers), len(other.trainers)) == (2, 3)
    assert (task.referred, other.referred) == (1, 0)
    assert study.user_attrs["references"]["initial"]["scores"]["Mem"] == 0.0


def test_a_resumed_search_proposes_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    whole, _ = search(tmp_path / "whole", StandIn(), 4)
    search(tmp_path / "parts", StandIn(), 2)
    parts, _ = search(tmp_path / "parts", StandIn(), 4)
    assert rhos(parts) == rhos(whole)
    assert len(set(rhos(whole))) == 4
    other, _ = search(tmp_path / "other", StandIn(), 2, seed=1)
    assert rhos(other) != rhos(whole)[:2]


def test_an_interrupted_trial_is_run_again_with_its_settings(tmp_path: Path) -> None:
    task = StandIn()

    def interrupt(step: int) -> None:
        if len(task.trainers) == 3 and step == 2:
            raise KeyboardInterrupt

    task.during = interrupt
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "a", task, 5)
    study, _ = search(tmp_path / "a", StandIn(), 5)
    whole, _ = search(tmp_path / "b", StandIn(), 5)
    assert states(study) == ["COMPLETE"] * 2 + ["FAIL"] + ["COMPLETE"] * 3
    assert rhos(study) == rhos(whole)


def test_the_pruner_sees_the_glance_at_fractions_and_ends_the_run(tmp_path: Path) -> None:
    """The sixth trial starts better than the median of the five before it, and is worse at half of the run."""
    task = StandIn()
    task.glance = lambda values, step: (0.5, 0.1)[step - 1] if len(task.trainers) == 6 else 0.2 + 0.2 * step
    observer = Silent()
    study, _ = search(tmp_path, task, 6, pruner="median", observer=observer)
    assert observer.ends == ["done"] * 5 + ["pruned"] and observer.texts[-1] == "at 50 % with 0.100"
    *good, last = study.get_trials(deepcopy=False)
    assert good[0].intermediate_values == pytest.approx({25: 0.4, 50: 0.6, 75: 0.8})
    assert last.intermediate_values == {25: 0.5, 50: 0.1}
    assert [trainer.steps for trainer in task.trainers] == [STEPS] * 5 + [2]
    assert not trial_folder(tmp_path, last.number).exists() and "figures" not in last.user_attrs


def test_without_pruner_nothing_is_looked_at_on_the_way(tmp_path: Path) -> None:
    task = StandIn()
    task.glance = lambda values, step: pytest.fail("looked at")
    study, _ = search(tmp_path, task, 1)
    assert states(study) == ["COMPLETE"]


def test_what_fails_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    observer, task = Silent(), StandIn()
    usual = task.figures

    def second_fails(values: Mapping[str, Any]) -> dict[str, float]:
        if len(task.trainers) == 2:
            raise RuntimeError("CUDA out of\nmemory")
        return usual(values)

    task.figures = second_fails
    study, stopped = search(tmp_path, task, 3, observer=observer)
    assert stopped is None
    assert observer.ends == ["done", "failed", "done", "done"]
    assert observer.texts[1] == "RuntimeError: CUDA out of memory" and observer.texts[2].startswith("Agg_MU 0.")
    failed = study.get_trials()[1]
    assert failed.user_attrs["error"] == "RuntimeError: CUDA out of memory" and "scores" not in failed.user_attrs


def test_figures_that_are_not_finite_are_a_failure(tmp_path: Path) -> None:
    task = StandIn(lambda values: {"mem": float("nan"), "util": 0.5})
    study, stopped = search(tmp_path, task, 5)
    assert states(study) == ["FAIL"] * 3
    assert stopped and "3 trials failed and none worked" in stopped and "mem is not finite" in stopped


def test_failures_end_the_search_only_if_nothing_works(tmp_path: Path) -> None:
    """Three at once at the start; later as many as trials were asked for."""
    broken = StandIn(lambda values: {"mem": float("inf"), "util": 0.5})
    study, stopped = search(tmp_path / "a", broken, 20)
    assert states(study) == ["FAIL"] * 3 and stopped
    search(tmp_path / "b", StandIn(), 1)
    study, stopped = search(tmp_path / "b", broken, 4)
    assert states(study) == ["COMPLETE"] + ["FAIL"] * 4 and stopped and "4 trials failed, so" in stopped


@pytest.mark.parametrize(("keep", "kept"), [("best", {0.45}), ("all", {0.3, 0.45, 0.8}), ("none", set())])
def test_models_are_kept_as_asked(keep: str, kept: set[float], tmp_path: Path) -> None:
    study, _ = search(tmp_path, StandIn(), 3, sampler="grid", space=GRID, keep=keep)
    found = {rho for rho, trial in by_rho(study).items() if trial_folder(tmp_path, trial.number).is_dir()}
    assert found == kept


def test_evaluations_of_beaten_trials_stay(tmp_path: Path) -> None:
    task = StandIn()

    def evaluate(values: Mapping[str, Any]) -> dict[str, float]:
        folder = Path(task.trainers[-1].args.output_dir) / "evals"
        folder.mkdir(parents=True)
        return {"mem": 1 - values["rho"], "util": values["rho"]}

    task.figures = evaluate
    study, _ = search(tmp_path, task, 3, sampler="grid", space=GRID)
    folders = [trial_folder(tmp_path, number) for number in range(3)]
    assert all((folder / "evals").is_dir() for folder in folders)
    assert [number for number in range(3) if (folders[number] / "config.json").exists()] == [study.best_trial.number]


def test_a_grid_is_searched_once(tmp_path: Path) -> None:
    study, _ = search(tmp_path, StandIn(), 50, sampler="grid", space=GRID)
    assert sorted(rhos(study)) == [0.3, 0.45, 0.8]


def test_a_grid_after_another_sampler_is_searched_whole(tmp_path: Path) -> None:
    """The trials that are there already do not count as combinations."""
    study, _ = search(tmp_path, StandIn(), 2, space=GRID)
    study, _ = search(tmp_path, StandIn(), grid_size(GRID, study), sampler="grid", space=GRID)
    assert sorted(rhos(study)[2:]) == [0.3, 0.45, 0.8] and len(rhos(study)) == 5
    assert grid_size(GRID, study) == 5


def test_a_grid_that_was_searched_is_left_alone(tmp_path: Path) -> None:
    """One combination fails, so that fewer trials are finished than there are combinations."""

    def failing(values: Mapping[str, Any]) -> dict[str, float]:
        if values["rho"] == 0.45:
            raise RuntimeError("out of memory")
        return {"mem": 0.5, "util": 0.5}

    for _ in range(3):
        study, _ = search(tmp_path, StandIn(failing), 3, sampler="grid", space=GRID)
        assert sorted(states(study)) == ["COMPLETE", "COMPLETE", "FAIL"]


def test_combinations_of_killed_workers_are_all_run_again(tmp_path: Path) -> None:
    """Optuna counts them as done and would stop after the first."""
    study = open_study(None, "s", tmp_path, create=True)
    study.sampler = make_sampler("grid", GRID, 0)
    (tmp_path / "workers").mkdir()
    for number in range(3):
        trial = study.ask()
        GRID.suggest(trial)
        trial.set_user_attr("worker", f"dead-{number}")
        (tmp_path / "workers" / f"dead-{number}").touch()
    study, _ = search(tmp_path, StandIn(), 3, sampler="grid", space=GRID)
    assert states(study) == ["FAIL"] * 3 + ["COMPLETE"] * 3
    assert sorted(rhos(study)) == [0.3, 0.45, 0.8]


@pytest.mark.parametrize("end", ["FAIL", "PRUNED"])
def test_an_interruption_between_trials_repeats_none(end: str, tmp_path: Path) -> None:
    """The second trial fails or is pruned, and the interruption comes when that is shown."""

    class Interrupting(Silent):
        def finished(self, label: str, status: str, text: str) -> None:
            super().finished(label, status, text)
            if status == {"FAIL": "failed", "PRUNED": "pruned"}[end]:
                raise KeyboardInterrupt

    task = StandIn()
    usual = task.figures

    def second(values: Mapping[str, Any]) -> dict[str, float]:
        if len(task.trainers) == 2:
            raise optuna.TrialPruned if end == "PRUNED" else RuntimeError("out of memory")
        return usual(values)

    task.figures = second
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, task, 3, observer=Interrupting())
    assert states(open_study(None, "s", tmp_path, create=False)) == ["COMPLETE", end]


def test_two_workers_share_one_study(tmp_path: Path) -> None:
    """Together they run what was asked for (one more if both end at the same moment), and nothing twice."""
    open_study(None, "s", tmp_path, create=True)
    child = os.fork()
    if child == 0:
        search(tmp_path, StandIn(), 6)
        os._exit(0)
    own = StandIn()
    study, _ = search(tmp_path, own, 6)
    os.waitpid(child, 0)
    assert 6 <= len(rhos(study)) == len(set(rhos(study))) <= 7
    assert len({trial.user_attrs["worker"] for trial in study.get_trials()}) == 2
