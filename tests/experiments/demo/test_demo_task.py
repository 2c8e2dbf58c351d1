"""The embedded task: all cells of a seed start from the same weights, and are measured as the demo measures."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from rosu_llm.data.pairing import ForgetRetainDataset
from rosu_llm.errors import ConfigError
from rosu_llm.experiments.ablate.grid import free_grid
from rosu_llm.experiments.attempt import train_quietly
from rosu_llm.experiments.config_task import complete
from rosu_llm.experiments.demo import task as demo_task
from rosu_llm.experiments.demo.task import COMMON, CONTENDERS, DemoTask
from rosu_llm.experiments.demo.world import SMOKE, build_world, learn, measure, small_llama, spoken
from rosu_llm.recipes.settings import build
from rosu_llm.training.config import ROSUConfig
from rosu_llm.training.trainer import ROSUTrainer
from tests.experiments.test_config_task import run

QUIET: Any = lambda *_: None


def test_a_cell_equals_training_a_copy_in_memory(tmp_path: Path) -> None:
    """Same seed and settings without recipe, files and cells: the taught model is copied and the copy is trained."""
    world = build_world(3, people=SMOKE.people)
    model = small_llama(len(world.tokenizer), 3, hidden=SMOKE.hidden, layers=SMOKE.layers)
    samples = [*world.data["forget"].samples, *world.data["retain"].samples]
    learn(model, samples, epochs=SMOKE.learning_epochs, seed=3)
    before = measure(model, world)
    settings: dict[str, Any] = {**COMMON, **SMOKE.overrides, **CONTENDERS["rosu_small"]}
    plain = {"use_cpu": True, "report_to": [], "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    config = ROSUConfig(output_dir=str(tmp_path / "copy"), seed=3, **plain, **settings)
    pairs = ForgetRetainDataset(world.data["forget"], world.data["retain"], seed=3)
    holdout = world.data["calibration"]
    trainer = ROSUTrainer(copy.deepcopy(model), config, train_dataset=pairs, holdout_dataset=holdout)
    trainer.train()

    task = DemoTask(SMOKE, {}, tmp_path)
    assert task.refer("before", 3, QUIET).measure() == before
    started = task.start({**task.base, **CONTENDERS["rosu_small"]}, 3, tmp_path / "cell", QUIET)
    train_quietly(started.trainer, QUIET)
    assert started.measure() == measure(trainer.model, world)
    assert set(started.measure()) >= set(task.columns)
    assert started.details is not None
    log, found = started.details().values()
    assert log == [entry for entry in trainer.state.log_history if "loss" in entry] and log
    assert [entry["answer"] for entry in found] == spoken(trainer.model, world, [entry["question"] for entry in found])
    assert {entry["split"] for entry in found} == {"forget", "retain"}


def test_a_preset_goes_before_the_demos_own_settings_and_after_given_ones(tmp_path: Path) -> None:
    base = DemoTask(SMOKE, {"preset": "small", "kappa": 0.3}, tmp_path).base
    expected = {**COMMON, "use_cpu": True, **SMOKE.overrides, **CONTENDERS["rosu_small"], "kappa": 0.3}
    assert complete(base) == {**complete(expected), "preset": "small"}
    axes = ["method=rosu,graddiff,npo", "forget_until=holdout,off", "keep_best=off"]
    for variant in free_grid(axes, base, {}).variants:  # the preset's other settings give way
        assert complete({**base, **variant.settings})["forget_until"] == variant.settings["forget_until"]
        build({**base, **variant.settings, "output_dir": "unused"})
    with pytest.raises(ConfigError, match="Unknown preset"):
        DemoTask(SMOKE, {"preset": "tiny"}, tmp_path)


def test_the_model_is_taught_once_per_seed_and_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taught: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> None:
        taught.append(kwargs["seed"])
        learn(*args, **kwargs)

    monkeypatch.setattr(demo_task, "learn", counted)
    still = {"learning_rate": 0.0, "weight_decay": 0.0, "method": "ft"}
    for _ in range(2):
        task = DemoTask(SMOKE, still, tmp_path)
        cell = run(task, task.base, tmp_path / "cell", seed=1)
        assert cell == task.refer("before", 1, QUIET).measure()  # a cell that does not move measures where it started
    assert taught == [1]
    (folder,) = tmp_path.glob("demo-seed1-*")
    assert [*folder.glob("*.safetensors")] and not [*tmp_path.glob("*.partial")]

    world = build_world(1, people=SMOKE.people)
    model = small_llama(len(world.tokenizer), 1, hidden=SMOKE.hidden, layers=SMOKE.layers)
    samples = [*world.data["forget"].samples, *world.data["retain"].samples]
    learn(model, samples, epochs=SMOKE.learning_epochs, seed=1)
    assert measure(model, world) == cell


def test_retain_samples_per_forget_sample_reach_the_batches(tmp_path: Path) -> None:
    task = DemoTask(SMOKE, {}, tmp_path)
    one, two = (run(task, {**task.base, "retain_per_forget": n}, tmp_path / "cell") for n in (1, 2))
    assert one != two


def test_a_kept_model_is_the_one_that_was_measured(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    task = DemoTask(SMOKE, {}, tmp_path)
    metrics = run(task, task.base, tmp_path / "cell", keep=True)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "cell")
    with torch.no_grad():
        assert measure(model, build_world(0, people=SMOKE.people)) == metrics


@pytest.mark.parametrize("key", ["model_name_or_path", "forget_data", "limit"])
def test_the_task_brings_its_own_model_and_data(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} has no place in the task 'demo'"):
        DemoTask(SMOKE, {key: "x"}, tmp_path)


def test_representation_level_is_refused(tmp_path: Path) -> None:
    task = DemoTask(SMOKE, {"forget_loss": "representation", "retain_loss": "representation"}, tmp_path)
    with pytest.raises(ConfigError, match="use --config FILE"):
        task.start(task.base, 0, tmp_path / "cell", QUIET)
