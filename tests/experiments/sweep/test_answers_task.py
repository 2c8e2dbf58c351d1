"""Mem and Util without TOFU: closed forms, and the same figures as the ablation's task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rosu_llm.errors import ConfigError
from rosu_llm.experiments.config_task import ConfigTask
from rosu_llm.experiments.sweep.answers_task import AnswersTask
from rosu_llm.toys.recipe import toy_values
from tests.experiments.test_config_task import HIDDEN, NAMES, PATTERN

QUIET: Any = lambda *_: None


@pytest.fixture
def task(tmp_path: Path) -> AnswersTask:
    return AnswersTask(ConfigTask(toy_values(NAMES, tmp_path)), 0)


def test_scores_are_the_written_formulas(task: AnswersTask) -> None:
    figures = {"forget_em": 0.2, "forget_prob": 0.5, "retain_prob": 0.6, "mia_auc": 0.3}
    references = {"initial": {"retain_prob": 0.8}}
    scores = task.scores(figures, references)
    mem, util = 2 / (1 / 0.8 + 1 / 0.5), 0.75
    assert scores == pytest.approx(
        {"Agg_MU": 2 / (1 / mem + 1 / util), "Mem": mem, "Util": util, "Priv": None, "Agg": None}
    )
    gold = {**references, "retain": {"retain_prob": 0.7, "mia_auc": 0.6}}
    with_priv = task.scores(figures, gold)
    assert with_priv["Priv"] == pytest.approx(1 - 0.3 / 0.6)  # |a − r| / max(r, 1 − r)
    assert with_priv["Agg"] == pytest.approx(3 / (1 / mem + 1 / util + 1 / 0.5))
    assert with_priv["Agg_MU"] == scores["Agg_MU"]


def test_the_glance_is_agg_mu_of_the_model_as_it_is(task: AnswersTask, tmp_path: Path) -> None:
    references = task.refer(QUIET)
    assert set(references) == {"initial"}
    run = task.start({**task.base, "learning_rate": 1e-2}, references, tmp_path / "trial", QUIET)
    before = run.glance()
    assert before == pytest.approx(task.scores(references["initial"], references)["Agg_MU"])
    run.trainer.train()
    assert run.glance() == pytest.approx(task.scores(run.measure(), references)["Agg_MU"]) != before


def test_losses_are_nothing_to_select_by(tmp_path: Path) -> None:
    values = {**toy_values({**NAMES, **HIDDEN}, tmp_path), "trainable_parameters": PATTERN}
    with pytest.raises(ConfigError, match="no Mem and Util to select by"):
        AnswersTask(ConfigTask(values), 0)
