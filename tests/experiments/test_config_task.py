"""A task from a configuration: loaded as ``rosu train`` does, measured on its own data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rosu_llm.data.sources import load_samples
from rosu_llm.errors import ConfigError, DataError
from rosu_llm.experiments.attempt import Task, train_quietly
from rosu_llm.experiments.config_task import ConfigTask, _final_losses, complete
from rosu_llm.losses import logits_of, token_nll
from rosu_llm.toys import toy_values

QUIET: Any = lambda *_: None
NAMES = {"model_name_or_path": "m", "forget_data": "f", "retain_data": "r"}
HIDDEN = {"forget_loss": "representation", "retain_loss": "representation", "target_layer": 1, "noise_std": 0.3}
PATTERN = r"layers\.(0|1)\.mlp\.down_proj\.weight$"


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    return toy_values(NAMES, tmp_path)


def run(task: Task, values: Mapping[str, Any], folder: Path, *, seed: int = 0, keep: bool = False) -> dict[str, float]:
    """Train and measure; the folder stays, so that one sees what was left there."""
    started = task.start(values, seed, folder, QUIET)
    train_quietly(started.trainer, QUIET)
    if keep:
        started.trainer.save_model()
    return dict(started.measure())


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
    before = task.refer("before", 0, QUIET).measure()
    for part in ("forget", "retain"):
        expected = probability(values["model_name_or_path"], values[f"{part}_data"])
        assert before[f"{part}_prob"] == pytest.approx(expected, rel=1e-4)
    after = run(task, {**values, "learning_rate": 1e-2}, tmp_path / "cell", keep=True)
    assert set(task.columns) <= set(after)
    assert after["forget_prob"] == pytest.approx(probability(str(tmp_path / "cell"), values["forget_data"]), rel=1e-4)
    assert after["forget_prob"] != before["forget_prob"]


def test_nothing_is_saved_unless_asked_for(values: dict[str, Any], tmp_path: Path) -> None:
    cell = tmp_path / "cell"
    run(ConfigTask(values), {**values, "save_strategy": "epoch"}, cell)
    assert not [*cell.rglob("*.safetensors")]


def test_cells_do_not_depend_on_those_before_them(values: dict[str, Any], tmp_path: Path) -> None:
    task = ConfigTask({**values, "lora_r": 2, "lora_dropout": 0.1})
    first, _, third = (run(task, {**task.base, "rho": rho}, tmp_path / "cell") for rho in (0.1, 5.0, 0.1))
    assert first == third


def test_without_held_out_data_there_is_no_attack(values: dict[str, Any]) -> None:
    assert "mia_auc" in ConfigTask(values).columns
    task = ConfigTask({**values, "holdout_data": None})
    assert "mia_auc" not in task.columns and "mia_auc" not in task.plotted
    assert "mia_auc" not in task.refer("before", 0, QUIET).measure()


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


@pytest.mark.parametrize("name", ["budget_data", "alternates", "memory_file", "base_model"])
def test_changed_files_that_only_some_runs_read_are_another_task(
    name: str, values: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "read"
    path.write_text("one")
    task, settings = ConfigTask(values), complete({**values, name: str(path)})
    first = task.identity(settings)
    path.write_text("two")
    assert task.identity(settings) != first


def test_the_model_before_is_measured_whatever_the_runs_look_at(values: dict[str, Any], tmp_path: Path) -> None:
    plain = ConfigTask(values).refer("before", 0, QUIET).measure()
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    watching = {"forget_until": "alternates", "alternates": str(other), "budget": 0.02, "budget_measure": "kl"}
    for own in (watching, {**watching, "preset": "recommended"}):
        assert ConfigTask({**values, **own}).refer("before", 0, QUIET).measure() == plain


def test_what_is_missing_is_said_before_any_cell() -> None:
    with pytest.raises(ConfigError, match="forget_data is missing"):
        ConfigTask({"model_name_or_path": "m", "retain_data": "r"})


def test_representation_level_is_measured_by_its_losses(tmp_path: Path) -> None:
    values = {**toy_values({**NAMES, **HIDDEN}, tmp_path), "trainable_parameters": PATTERN, "max_steps": 3}
    task = ConfigTask(values)
    metrics = run(task, values, tmp_path / "cell")
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
