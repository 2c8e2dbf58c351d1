"""A task from a configuration: loaded as ``rosu train`` does, measured on its own data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rosu_llm.data.sources import load_samples
from rosu_llm.errors import ConfigError, DataError
from rosu_llm.experiments.config_task import ConfigTask, _final_losses
from rosu_llm.experiments.settings import complete
from rosu_llm.losses import logits_of, token_nll
from rosu_llm.toys.recipe import toy_values

QUIET: Any = lambda *_: None
NAMES = {"model_name_or_path": "m", "forget_data": "f", "retain_data": "r"}
HIDDEN = {"forget_loss": "representation", "retain_loss": "representation", "target_layer": 1, "noise_std": 0.3}
PATTERN = r"layers\.(0|1)\.mlp\.down_proj\.weight$"


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    return toy_values(NAMES, tmp_path)


def probability(folder: str, source: str) -> float:
    """Mean over samples of exp(mean log-probability of the answer), one sample at a time."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    total, samples = 0.0, load_samples(source, tokenizer)
    for i in range(len(samples)):
        batch = {key: torch.as_tensor(samples[i][key]).unsqueeze(0) for key in ("input_ids", "labels")}
        with torch.no_grad():
            nll = token_nll(logits_of(model, batch), batch["labels"])
        count = (batch["labels"][:, 1:] != -100).sum()
        total += float(torch.exp(-nll.sum() / count)) / len(samples)
    return total


def test_before_and_after_are_measured_on_the_given_data(values: dict[str, Any], tmp_path: Path) -> None:
    task = ConfigTask(values)
    before = task.refer("before", 0, QUIET)
    for part in ("forget", "retain"):
        expected = probability(values["model_name_or_path"], values[f"{part}_data"])
        assert before[f"{part}_prob"] == pytest.approx(expected, rel=1e-4)
    after = task.run({**values, "learning_rate": 1e-2}, 0, tmp_path / "cell", keep=True, steps=QUIET)
    assert set(task.columns) <= set(after)
    assert after["forget_prob"] == pytest.approx(probability(str(tmp_path / "cell"), values["forget_data"]), rel=1e-4)
    assert after["forget_prob"] != before["forget_prob"]


def test_nothing_is_saved_unless_asked_for(values: dict[str, Any], tmp_path: Path) -> None:
    cell = tmp_path / "cell"
    ConfigTask(values).run({**values, "save_strategy": "epoch"}, 0, cell, keep=False, steps=QUIET)
    assert not [*cell.rglob("*.safetensors")]


def test_cells_do_not_depend_on_those_before_them(values: dict[str, Any], tmp_path: Path) -> None:
    task = ConfigTask({**values, "lora_r": 2, "lora_dropout": 0.1})
    first, _, third = (
        task.run({**task.base, "rho": rho}, 0, tmp_path / "cell", keep=False, steps=QUIET) for rho in (0.1, 5.0, 0.1)
    )
    assert first == third


def test_without_held_out_data_there_is_no_attack(values: dict[str, Any]) -> None:
    assert "mia_auc" in ConfigTask(values).columns
    task = ConfigTask({**values, "holdout_data": None})
    assert "mia_auc" not in task.columns and "mia_auc" not in task.plotted
    assert "mia_auc" not in task.refer("before", 0, QUIET)


def test_calibration_on_the_attacks_non_members_is_said(values: dict[str, Any]) -> None:
    assert not ConfigTask(values).notes
    assert "calibrate: holdout" in ConfigTask({**values, "calibrate": "holdout"}).notes[0]


def test_changed_files_are_another_task(values: dict[str, Any]) -> None:
    task, settings = ConfigTask(values), complete(values)
    first = task.identity(settings)
    assert task.identity(settings) == first
    path = Path(values["retain_data"])
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")
    second = task.identity(settings)
    (Path(values["model_name_or_path"]) / "config.json").touch()
    assert first != second != task.identity(settings)


def test_what_is_missing_is_said_before_any_cell() -> None:
    with pytest.raises(ConfigError, match="forget_data is missing"):
        ConfigTask({"model_name_or_path": "m", "retain_data": "r"})


def test_representation_level_is_measured_by_its_losses(tmp_path: Path) -> None:
    values = {**toy_values({**NAMES, **HIDDEN}, tmp_path), "trainable_parameters": PATTERN, "max_steps": 3}
    task = ConfigTask(values)
    metrics = task.run(values, 0, tmp_path / "cell", keep=False, steps=QUIET)
    assert set(metrics) == set(task.columns) == {"loss_forget", "loss_retain"}
    assert all(value > 0.0 for value in metrics.values())
    assert not task.references
    assert not [*(tmp_path / "cell").rglob("*.safetensors")]


def test_final_losses_are_the_mean_of_the_last_tenth() -> None:
    history = [{"loss/forget": float(i), "loss/retain": 2.0 * i, "step": i} for i in range(1, 21)]
    assert _final_losses([*history, {"train_runtime": 1.0}]) == {"loss_forget": 19.5, "loss_retain": 39.0}
    assert _final_losses([{"loss/retain": 3.0}]) == {"loss_retain": 3.0}
    with pytest.raises(DataError, match="No step was taken"):
        _final_losses([])
