"""Mem and Util without TOFU: closed forms, and the same figures as the ablation's task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from optuna.trial import Trial
from transformers import TrainerCallback

from rosu_llm.errors import ConfigError
from rosu_llm.experiments.attempt import train_quietly
from rosu_llm.experiments.config_task import ConfigTask
from rosu_llm.experiments.sweep.sampler import make_sampler
from rosu_llm.experiments.sweep.scoring import answers_scoring
from rosu_llm.experiments.sweep.search import Sweep, run_sweep
from rosu_llm.experiments.sweep.space import read_space
from rosu_llm.experiments.sweep.study import open_study
from rosu_llm.toys import toy_values
from tests.experiments.stand_in import Silent
from tests.experiments.test_config_task import HIDDEN, NAMES, PATTERN

QUIET: Any = lambda *_: None


@pytest.fixture
def task(tmp_path: Path) -> ConfigTask:
    return ConfigTask(toy_values(NAMES, tmp_path))


def test_scores_are_the_written_formulas(task: ConfigTask) -> None:
    figures = {"forget_em": 0.2, "forget_prob": 0.5, "retain_prob": 0.6, "mia_auc": 0.3}
    references = {"initial": {"retain_prob": 0.8}}
    scoring = answers_scoring(task)
    scores = scoring.scores(figures, references)
    mem, util = 2 / (1 / 0.8 + 1 / 0.5), 0.75
    assert scores == pytest.approx(
        {"Agg_MU": 2 / (1 / mem + 1 / util), "Mem": mem, "Util": util, "Priv": None, "Agg": None}
    )
    gold = {**references, "retain": {"retain_prob": 0.7, "mia_auc": 0.6}}
    with_priv = scoring.scores(figures, gold)
    assert with_priv["Priv"] == pytest.approx(1 - 0.3 / 0.6)  # |a − r| / max(r, 1 − r)
    assert with_priv["Agg"] == pytest.approx(3 / (1 / mem + 1 / util + 1 / 0.5))
    assert with_priv["Agg_MU"] == scores["Agg_MU"]


def test_without_a_glance_of_its_own_pruning_sees_agg_mu_of_the_model_as_it_is(
    task: ConfigTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(task.references) == {"before"}
    space, scoring = read_space(None, ["learning_rate=1e-2"], task.base), answers_scoring(task)
    study = open_study(None, "s", tmp_path, create=True)
    seen: list[float] = []
    monkeypatch.setattr(Trial, "report", lambda self, value, step: seen.append(value))
    sweep = Sweep(study, task, scoring, 0, space, {}, tmp_path, 1, fractions=(0.5,), keep="all")
    assert run_sweep(sweep, make_sampler("random", space, 0), Silent()) is None
    references = {"initial": study.user_attrs["references"]["initial"]["figures"]}
    assert references["initial"] == task.refer("before", 0, QUIET).measure()
    first = task.start({**task.base, "learning_rate": 1e-2}, 0, tmp_path / "trial", QUIET)
    assert first.glance is None

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= state.max_steps / 2

    first.trainer.add_callback(Stop())
    train_quietly(first.trainer, QUIET)
    assert seen == [pytest.approx(scoring.scores(first.measure(), references)["Agg_MU"])]


def test_losses_are_nothing_to_select_by(tmp_path: Path) -> None:
    values = {**toy_values({**NAMES, **HIDDEN}, tmp_path), "trainable_parameters": PATTERN}
    with pytest.raises(ConfigError, match="no Mem and Util to select by"):
        answers_scoring(ConfigTask(values))
