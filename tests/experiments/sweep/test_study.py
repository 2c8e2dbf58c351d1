"""The study: what it was started with, and trials whose process is gone."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import optuna
import pytest

from rosu_llm.errors import ConfigError, DataError
from rosu_llm.experiments.sweep.sampler import make_pruner, make_sampler, place
from rosu_llm.experiments.sweep.space import read_space
from rosu_llm.experiments.sweep.study import (
    _place,
    clear_conditions,
    is_gone,
    open_study,
    pin_conditions,
    reclaim,
    requeue,
    worker_lock,
)
from tests.experiments.sweep.stand_in import SPACE, StandIn, rhos, search, states


def test_other_conditions_are_refused_with_what_differs(tmp_path: Path) -> None:
    study = open_study(None, "s", tmp_path, create=True)
    pin_conditions(study, {"recipe": {"rho": 0.4, "method": "rosu"}, "seed": 0, "space": {"lr": {"low": (1, 2)}}})
    again = open_study(None, "s", tmp_path, create=True)
    pin_conditions(again, {"seed": 0, "recipe": {"method": "rosu", "rho": 0.4}, "space": {"lr": {"low": [1, 2]}}})
    with pytest.raises(ConfigError) as caught:
        pin_conditions(
            again, {"recipe": {"rho": 0.5, "method": "rosu"}, "seed": 0, "space": {"lr": {"low": [1, 2]}}, "limit": 3}
        )
    message = str(caught.value)
    assert "limit was not set, now 3; recipe.rho was 0.4, now 0.5." in message and "method" not in message
    pin_conditions(open_study(None, "s", tmp_path / "other", create=True), {"recipe": {"rho": 0.5}})


def test_what_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no study"):
        open_study(None, "s", tmp_path / "nowhere", create=False)
    assert not (tmp_path / "nowhere").exists()
    open_study(None, "s", tmp_path, create=True)
    out = tmp_path / "new"
    with pytest.raises(DataError, match="no study 'other'"):
        open_study(f"sqlite:///{tmp_path}/study.db", "other", out, create=False)
    for url in ("nonsense", "nosuchdb://host/name"):
        with pytest.raises(ConfigError, match="cannot be opened") as caught:
            open_study(url, "s", out, create=True)
        assert "\n" not in str(caught.value)
    open_study(None, "s", out, create=True)  # the folder belongs to none of these
    with pytest.raises(ConfigError, match="cannot be made a folder"):
        open_study(None, "s", out / "study.db" / "below", create=True)


def test_a_folder_belongs_to_one_study(tmp_path: Path) -> None:
    """Another one would begin with trial 0 again, in the same folder."""
    out, other = tmp_path / "sweep", f"sqlite:///{tmp_path}/other.db"
    search(out, StandIn(), 1)
    for url, name in ((None, "second"), (other, "s")):
        for create in (True, False):
            with pytest.raises(ConfigError, match=r"study 's' in study\.db, which .*use another --out"):
                open_study(url, name, out, create=create)
    assert (out / "trials" / "0000" / "config.json").is_file()
    assert optuna.get_all_study_names(f"sqlite:///{out}/study.db") == ["s"]
    assert not (tmp_path / "other.db").exists()
    moved = out.rename(tmp_path / "moved")
    for url in (None, f"sqlite:///{moved}/study.db"):
        assert states(open_study(url, "s", moved, create=True)) == ["COMPLETE"]


def test_no_password_is_left_in_the_folder(tmp_path: Path) -> None:
    assert _place("postgresql://me:secret@host/name", tmp_path) == "postgresql://me:***@host/name"


def test_workers_wait_for_each_other_in_any_database_file(tmp_path: Path) -> None:
    for url in (None, f"sqlite:///{tmp_path}/other.db"):
        study = open_study(url, "s", tmp_path / str(url is None), create=True)
        backend: Any = study._storage
        assert backend._backend.engine_kwargs["connect_args"]["timeout"] == 60


def test_a_start_that_fails_does_not_tie_the_study(tmp_path: Path) -> None:
    task = StandIn()
    for error in (DataError("no such data"), KeyboardInterrupt()):
        task.refer = _raising(error)  # type: ignore[method-assign]
        with pytest.raises(type(error)):
            search(tmp_path, task, 1)
    study, _ = search(tmp_path, StandIn(), 1, space=read_space(None, ["rho=0.3,0.4"], StandIn.base))
    clear_conditions(study)
    with pytest.raises(ConfigError, match="started differently"):
        search(tmp_path, StandIn(), 2)


def test_what_one_worker_takes_back_another_one_writes_down_again(tmp_path: Path) -> None:
    task = StandIn()
    usual = task.refer

    def refer(*args: Any) -> Any:
        clear_conditions(open_study(None, "s", tmp_path, create=False))  # a worker elsewhere fails meanwhile
        return usual(*args)

    task.refer = refer  # type: ignore[method-assign]
    study, _ = search(tmp_path, task, 1)
    assert study.user_attrs["conditions"]["evaluation"] == {"task": "stand-in"}


def _raising(error: BaseException) -> Any:
    def refer(*args: Any) -> Any:
        raise error

    return refer


def test_a_worker_is_gone_when_its_process_is(tmp_path: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # another process, present until it is killed
        with worker_lock(tmp_path) as own:
            os.write(write, own.encode())
            time.sleep(60)
        os._exit(1)
    name = os.read(read, 200).decode()
    assert not is_gone(tmp_path, name)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert is_gone(tmp_path, name)
    assert not is_gone(tmp_path, "never-heard-of")
    with worker_lock(tmp_path) as own:
        assert not is_gone(tmp_path, own)
    assert not (tmp_path / own).exists()


@pytest.mark.filterwarnings("ignore:Heartbeat")
def test_only_trials_of_dead_workers_are_taken_back(tmp_path: Path) -> None:
    study = open_study(None, "s", tmp_path, create=True)
    (tmp_path / "dead").touch()
    with worker_lock(tmp_path) as alive:
        for worker in ("dead", alive, "elsewhere", None):
            trial = study.ask()
            trial.suggest_float("rho", 0.0, 1.0)
            if worker:
                trial.set_user_attr("worker", worker)
        reclaim(study, tmp_path)
        reclaim(study, tmp_path)
    assert states(study) == ["FAIL", "RUNNING", "RUNNING", "RUNNING", "WAITING"]
    dead, *_, again = study.get_trials()
    assert again.params == dead.params


@pytest.mark.filterwarnings("ignore:Heartbeat")
def test_the_last_trial_of_a_worker_that_gives_no_sign_is_run_again(tmp_path: Path) -> None:
    """Nothing is known of a worker elsewhere but its heartbeat, here an hour ago."""
    study = open_study(None, "s", tmp_path, create=True)
    for worker, hours in (("alive", 0), ("dead", 1)):
        trial = study.ask()
        trial.suggest_float("rho", 0.05, 0.95)
        trial.set_user_attr("worker", worker)
        backend: Any = study._storage
        backend.record_heartbeat(trial._trial_id)
        with sqlite3.connect(tmp_path / "study.db") as connection:
            shift = "UPDATE trial_heartbeats SET heartbeat = datetime(heartbeat, ?) WHERE trial_id = ?"
            connection.execute(shift, (f"-{hours} hours", trial._trial_id))
    study, _ = search(tmp_path, StandIn(), 2)
    assert states(study) == ["RUNNING", "FAIL", "COMPLETE"]
    assert study.trials[2].params == study.trials[1].params


@pytest.mark.filterwarnings("ignore:Heartbeat")
def test_a_trial_that_kills_its_process_every_time_is_given_up(tmp_path: Path) -> None:
    study = open_study(None, "s", tmp_path, create=True)
    for _ in range(6):
        trial = study.ask()
        trial.suggest_float("rho", 0.0, 1.0)
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        requeue(study, study.trials[trial.number])
    values = [trial.params["rho"] for trial in study.get_trials() if trial.params]
    assert values[0] == values[1] == values[2] == values[3] != values[4]


@pytest.mark.filterwarnings("ignore:Heartbeat")
def test_a_trial_that_is_run_again_keeps_its_place(tmp_path: Path) -> None:
    study = open_study(None, "s", tmp_path, create=True)
    for number in range(4):
        study.ask()
        if number == 1:
            study.tell(1, state=optuna.trial.TrialState.FAIL)
            requeue(study, study.trials[1])
    # 0, 1 (killed), 2 (again 1), 3
    assert [place(study, trial) for trial in study.get_trials()] == [0, 1, 1, 2]


def test_a_killed_process_changes_nothing_in_the_end(tmp_path: Path) -> None:
    """SIGKILL in the middle of trial 1; the search goes on in another process as if nothing had happened."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        task = StandIn()

        def die(step: int) -> None:
            if len(task.trainers) == 2 and step == 2:
                os.write(write, b"x")
                time.sleep(60)

        task.during = die
        search(tmp_path / "killed", task, 4)
        os._exit(1)
    os.read(read, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    study, _ = search(tmp_path / "killed", StandIn(), 4)
    whole, _ = search(tmp_path / "whole", StandIn(), 4)
    assert states(study) == ["COMPLETE", "FAIL"] + ["COMPLETE"] * 3
    assert rhos(study) == rhos(whole)
    assert [t.value for t in study.get_trials() if t.value] == [t.value for t in whole.get_trials()]


def test_tpe_goes_on_in_another_process_as_it_would_have_in_this(tmp_path: Path) -> None:
    """Ten trials at random, then proposals that rest on them; a new sampler takes over after each part."""

    def proposed(*parts: int) -> list[float]:
        study = optuna.create_study(direction="maximize")
        for count in parts:
            study.sampler = make_sampler("tpe", SPACE, 0)
            study.optimize(lambda trial: -abs(SPACE.suggest(trial)["rho"] - 0.3), n_trials=count)
        return rhos(study)

    assert proposed(16) == proposed(4, 1, 7, 4)
    random = optuna.create_study(sampler=make_sampler("random", SPACE, 0))
    random.optimize(lambda trial: SPACE.suggest(trial)["rho"], n_trials=16)
    assert proposed(16)[:10] == rhos(random)[:10] and proposed(16)[10:] != rhos(random)[10:]


def test_hyperband_proposes_nothing_twice() -> None:
    """It shows a sampler one bracket at a time; the places in the search are those of the whole study."""

    def proposed(pruner: str) -> list[float]:
        study = optuna.create_study(study_name="s", pruner=make_pruner(pruner, (0.25, 0.5, 0.75)))
        study.sampler = make_sampler("random", SPACE, 0)
        study.optimize(lambda trial: SPACE.suggest(trial)["rho"], n_trials=12)
        return rhos(study)

    assert proposed("hyperband") == proposed("none")
    assert len(set(proposed("hyperband"))) == 12


def test_unknown_names_and_fractions_are_refused() -> None:
    for make, message in (
        (lambda: make_sampler("tp", SPACE, 0), "Did you mean 'tpe'"),
        (lambda: make_pruner("medan", (0.5,)), "Did you mean 'median'"),
        (lambda: make_pruner("median", (0.5, 1.0)), "--report-at 1 is no point inside a run"),
    ):
        with pytest.raises(ConfigError, match=message):
            _: Any = make()
