"""The embedded task: all cells of a seed start from the same weights, and are measured as the demo measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rosu_llm.errors import ConfigError
from rosu_llm.experiments.demo import task as demo_task
from rosu_llm.experiments.demo.measure import measure
from rosu_llm.experiments.demo.run import SMOKE, run_seed
from rosu_llm.experiments.demo.task import DemoTask
from rosu_llm.experiments.demo.world import build_world, learn, small_llama

QUIET: Any = lambda *_: None


def test_rows_equal_those_of_the_demo_itself(tmp_path: Path) -> None:
    """Same seed, same settings, another program: the demo trains, copies in memory and never writes weights."""
    expected = {row["method"]: row for row in run_seed(3, size=SMOKE, methods=["graddiff"], progress=QUIET).rows}
    task = DemoTask(SMOKE, {}, tmp_path)
    found = {
        "before": task.refer("before", 3, QUIET),
        "retain_only": task.refer("retain_only", 3, QUIET),
        "graddiff": task.run({**task.base, "method": "graddiff"}, 3, tmp_path / "cell", keep=False, steps=QUIET),
    }
    for name, metrics in found.items():
        assert metrics == {key: expected[name][key] for key in metrics}
        assert set(metrics) >= set(task.columns)


def test_the_model_is_taught_once_per_seed_and_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taught: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> None:
        taught.append(kwargs["seed"])
        learn(*args, **kwargs)

    monkeypatch.setattr(demo_task, "learn", counted)
    still = {"learning_rate": 0.0, "weight_decay": 0.0, "method": "ft"}
    for _ in range(2):
        task = DemoTask(SMOKE, still, tmp_path)
        cell = task.run(task.base, 1, tmp_path / "cell", keep=False, steps=QUIET)
        assert cell == task.refer("before", 1, QUIET)  # a cell that does not move measures where it started
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
    one, two = (
        task.run({**task.base, "retain_per_forget": n}, 0, tmp_path / "cell", keep=False, steps=QUIET) for n in (1, 2)
    )
    assert one != two


def test_a_kept_model_is_the_one_that_was_measured(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    task = DemoTask(SMOKE, {}, tmp_path)
    metrics = task.run(task.base, 0, tmp_path / "cell", keep=True, steps=QUIET)
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
        task.run(task.base, 0, tmp_path / "cell", keep=False, steps=QUIET)
