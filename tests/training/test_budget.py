"""A budget for what is kept: it is looked at, the run goes back to the same bits, pulls less, stops, and resumes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from rosu_llm import ForgetRetainDataset, ROSUTrainer
from rosu_llm.errors import ConfigError, DataError
from tests.models import flat, samples, tiny_llama
from tests.training.test_trainer import FORGET, RETAIN, config, logs

KEPT = samples(6, seed=9)


class Watch(TrainerCallback):
    """Weights, optimizer moments and learning rate after every step, before anything is looked at."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.moments: list[torch.Tensor] = []
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights.append(flat(kwargs["model"].parameters()))
        optimizer = kwargs["optimizer"]
        moments = [own["exp_avg"] for own in optimizer.state.values() if "exp_avg" in own]
        self.moments.append(flat(moments) if moments else torch.zeros(1))
        self.rates.append(optimizer.param_groups[0]["lr"])


def trainer(folder: Path, **settings: Any) -> tuple[ROSUTrainer, Watch]:
    kept = settings.pop("budget_dataset", KEPT)
    watch = Watch()
    made = ROSUTrainer(
        tiny_llama(dropout=0.1),
        config(folder, **{"lr_scheduler_type": "constant", "max_steps": 8, "budget_every": 2, **settings}),
        train_dataset=ForgetRetainDataset(FORGET, RETAIN),
        budget_dataset=kept,
        callbacks=[watch],
    )
    return made, watch


def test_a_budget_that_is_never_reached_changes_no_bit(tmp_path: Path) -> None:
    free, _ = trainer(tmp_path / "a")
    free.train()
    bound, _ = trainer(tmp_path / "b", budget=100.0)
    bound.train()
    assert torch.equal(flat(free.model.parameters()), flat(bound.model.parameters()))
    looks = [entry for entry in logs(bound) if "budget/rise" in entry]
    assert len(looks) == 4
    assert all(entry["budget/returns"] == 0.0 for entry in looks)


def test_outside_the_budget_the_run_goes_back_to_the_bits_it_had(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A budget nothing stays inside: back to the start each time, first with half the pull, then half the rate."""
    t, watch = trainer(tmp_path, budget=1e-9, budget_tries=2, learning_rate=5e-2)
    with caplog.at_level(logging.WARNING):
        t.train()
    start = flat(tiny_llama(dropout=0.1).parameters())
    assert [torch.equal(w, start) for w in watch.weights] == [True, False, True, False, True, False]
    assert all(not m.any() for m in watch.moments[::2])  # the optimizer has forgotten too
    assert watch.rates == [0.05, 0.05, 0.05, 0.05, 0.025, 0.025]
    assert t.state.global_step == 6  # the third return stops it
    assert torch.equal(flat(t.model.parameters()), start)
    pulls = [entry["step/amplification_ratio"] for entry in logs(t)]
    assert pulls == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.25, 0.25], rel=1e-3)  # a float32 displacement
    assert "the pull is now 0.5" in caplog.text
    assert "the learning rate is halved" in caplog.text
    assert "and stop" in caplog.text


def test_it_goes_back_to_the_last_weights_inside(tmp_path: Path) -> None:
    """The loss on the budget data is made to be inside at the first look and outside at the second."""
    t, watch = trainer(tmp_path, budget=0.5, max_steps=6)
    assert t._budget is not None
    measured = iter([1.0, 1.2, 2.0, 1.3])
    t._budget._measure = lambda: next(measured)
    t.train()
    assert torch.equal(watch.weights[4], watch.weights[2])
    assert torch.equal(watch.moments[4], watch.moments[2])
    assert not torch.equal(watch.weights[5], watch.weights[3])  # other data, another pull
    assert t.state.global_step == 6


def test_resuming_between_looks_reproduces_the_run(tmp_path: Path) -> None:
    """Saved after step 3: the note is of step 2, and the look at step 4 goes back to it, in both runs."""
    settings: dict[str, Any] = {"budget": 1e-3, "save_strategy": "steps", "save_steps": 3, "learning_rate": 5e-2}
    whole, _ = trainer(tmp_path, **settings)
    whole.train()
    again, _ = trainer(tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert torch.equal(flat(again.model.parameters()), flat(whole.model.parameters()))
    assert whole._budget is not None and again._budget is not None
    assert again._budget.state() == whole._budget.state()
    assert whole._budget.returns > 0


@pytest.mark.parametrize("more", [0, 2])
def test_a_run_that_its_budget_has_stopped_goes_on_only_with_more_tries(more: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"budget": 1e-9, "learning_rate": 5e-2, "save_strategy": "steps", "save_steps": 2}
    stopped, _ = trainer(tmp_path, budget_tries=0, **settings)
    stopped.train()
    assert stopped.state.global_step == 2
    again, watch = trainer(tmp_path, budget_tries=more, **settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == (6 if more else 2)
    assert bool(watch.weights) == bool(more)
    assert torch.equal(flat(again.model.parameters()), flat(stopped.model.parameters()))


def test_a_second_training_has_its_own_learning_rate(tmp_path: Path) -> None:
    t, watch = trainer(tmp_path, budget=0.5, max_steps=6, budget_tries=5, method="graddiff", lr_scheduler_type="linear")
    assert t._budget is not None
    for values in ([1.0, 2.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]):
        looks = iter(values)
        t._budget._measure = lambda looks=looks: next(looks)  # type: ignore[misc]
        t.train()
    fresh, free = trainer(tmp_path / "free", max_steps=6, method="graddiff", lr_scheduler_type="linear")
    fresh.train()
    assert watch.rates[:6] != free.rates
    assert watch.rates[6:] == free.rates


def test_a_state_that_is_younger_than_the_note_goes_with_its_step(tmp_path: Path) -> None:
    """A parameter that no batch before the note has used: it has no moments then."""
    t, _ = trainer(tmp_path, budget=0.5, max_steps=4, method="graddiff")
    assert t._budget is not None
    late = [p for p in t.model.parameters() if p.requires_grad][-1]

    moments: dict[str, Any] = {}
    values = iter([1.0, 1.2, 2.0])

    def looked() -> float:
        value = next(values)
        if value == 1.2:  # as if the note came before its first gradient
            moments["late"] = t.raw_optimizer().state.pop(late)
        elif value == 2.0:
            moments["after"] = len(t.raw_optimizer().state)
        return value

    t._budget._measure = looked
    t.train()
    assert late not in t.raw_optimizer().state
    assert len(t.raw_optimizer().state) == moments["after"] - 1


def test_a_method_without_a_pull_learns_more_slowly_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    t, watch = trainer(tmp_path, method="graddiff", budget=0.5, budget_tries=2, learning_rate=5e-2)
    assert t._budget is not None
    looks = iter([1.0, 2.0, 2.0, 2.0])
    t._budget._measure = lambda: next(looks)
    with caplog.at_level(logging.WARNING):
        t.train()
    assert watch.rates == [0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125]
    assert "the pull is now" not in caplog.text


@pytest.mark.parametrize(("every", "steps"), [(50, 4), (3, 4), (2, 4)])
@pytest.mark.parametrize("stopped", [False, True])
def test_no_run_ends_outside_the_budget(every: int, steps: int, stopped: bool, tmp_path: Path) -> None:
    """Whether the last step is due or not, and whoever ends the run."""

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == steps

    t, watch = trainer(tmp_path, budget=0.5, budget_every=every, max_steps=steps + 3 if stopped else steps)
    if stopped:
        t.add_callback(Stop())
    assert t._budget is not None
    looks = {0: 1.0, 2: 1.2, 3: 1.3, 4: 2.0}
    t._budget._measure = lambda: looks[t.state.global_step]
    t.train()
    assert t.state.global_step == steps and t._budget.returns == 1
    inside = {50: 0, 3: 3, 2: 2}[every]
    assert torch.equal(flat(t.model.parameters()), watch.weights[inside])  # before step inside + 1
    assert stopped or logs(t)[-1]["budget/returns"] == 1.0


@pytest.mark.parametrize("every", [2, 3, 4])
def test_the_closest_weights_are_looked_for_inside_the_budget(every: int, tmp_path: Path) -> None:
    """The last step comes closer to its targets than any other, and is outside."""
    settings: dict[str, Any] = {"forget_until": 1e6, "keep_best": "depth", "learning_rate": 1e-2, "method": "ng"}
    t, watch = trainer(tmp_path, budget=0.5, budget_every=every, max_steps=4, **settings)
    assert t._budget is not None
    looks = {0: 1.0, 2: 1.2, 3: 1.3, 4: 2.0}
    t._budget._measure = lambda: looks[t.state.global_step]
    t.train()
    inside = {2: 2, 3: 3, 4: 0}[every]
    assert torch.equal(flat(t.model.parameters()), watch.weights[inside])


def test_numbers_in_the_optimizers_state_return_too(tmp_path: Path) -> None:
    t, _ = trainer(tmp_path, budget=0.5, max_steps=4, optim="adafactor")
    assert t._budget is not None
    looks = iter([1.0, 1.2, 2.0])
    t._budget._measure = lambda: next(looks)
    t.train()
    assert {own["step"] for own in t.optimizer.state.values()} == {2}


def test_a_run_is_not_resumed_outside_a_smaller_budget(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    t, _ = trainer(tmp_path, budget=0.5, max_steps=4, **settings)
    assert t._budget is not None
    looks = iter([1.0, 1.2, 1.4])
    t._budget._measure = lambda: next(looks)
    t.train()
    again, watch = trainer(tmp_path, budget=0.3, **settings)
    with pytest.raises(ConfigError, match=r"budget=0.3 is exceeded by what .*checkpoint-4 .*: at step 4 .* by 40.0%"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert not watch.weights


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"budget": 0.0}, ConfigError, "exceeded from the start"),
        ({"budget": -0.1}, ConfigError, "exceeded from the start"),
        ({"budget": 0.1, "budget_every": 0}, ConfigError, "budget_every"),
        ({"budget": 0.1, "budget_tries": -1}, ConfigError, "budget_tries"),
        ({"budget": 0.1, "budget_dataset": None}, DataError, "none were given"),
        ({"budget": 0.1, "budget_dataset": KEPT[:1]}, DataError, "1 were given"),
    ],
)
def test_a_budget_that_cannot_work(
    settings: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        trainer(tmp_path, **settings)


def test_a_second_training_is_measured_by_what_was_before_the_first(tmp_path: Path) -> None:
    """And is refused where the first has spent the budget already."""
    t, _ = trainer(tmp_path, budget=0.5, max_steps=2)
    assert t._budget is not None
    for values, initial in (([1.0, 1.2], 1.0), ([1.3, 1.4], 1.0)):
        measured = iter(values)
        t._budget._measure = lambda measured=measured: next(measured)  # type: ignore[misc]
        t.train()
        assert t._budget.initial == initial
    t._budget._measure = lambda: 1.6
    with pytest.raises(ConfigError, match=r"budget=0.5 is exceeded before the first step: .* by 60.0%"):
        t.train()


def test_a_checkpoint_without_a_budget_is_no_start_for_one(tmp_path: Path) -> None:
    trainer(tmp_path, save_strategy="steps", save_steps=3)[0].train()
    with pytest.raises(ConfigError, match="rosu_budget_0"):
        trainer(tmp_path, budget=0.1)[0].train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.parametrize("choice", [{"budget": 0.1}, {"budget": None, "forget_until": 3.0, "keep_best": "depth"}])
def test_two_ways_to_choose_the_last_weights_are_refused(choice: dict[str, Any], tmp_path: Path) -> None:
    """Trainer would load its best checkpoint after the last look."""
    evaluated = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    with pytest.raises(ConfigError, match=r"load_best_model_at_end=True .*: leave one of them out"):
        trainer(tmp_path, **{"budget": 0.1, **choice, **evaluated})
