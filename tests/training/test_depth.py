"""Bounded forgetting through the trainer: where targets come from, what they change, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from rosu_llm import ForgetRetainDataset, ROSUTrainer
from rosu_llm.data.alternates import nearest_alternates
from rosu_llm.errors import ConfigError, DataError
from rosu_llm.geometry import METHODS
from rosu_llm.losses.reference import sample_keys
from rosu_llm.recipes.prepare import prepare
from rosu_llm.recipes.settings import build
from rosu_llm.space import LocalSpace
from rosu_llm.toys import toy_values
from rosu_llm.training.depth import _tokens, counterparts, drawn
from rosu_llm.training.method_checks import BEYOND
from tests.losses import naive
from tests.models import flat, samples, tiny_llama
from tests.training.test_trainer import FORGET, HOLDOUT, RETAIN, config, logs

ALTERNATES = [samples(2, seed=100 + i) for i in range(len(FORGET))]


def trainer(folder: Path, *, model: Any = None, **settings: Any) -> ROSUTrainer:
    own = {
        key: settings.pop(key, None) for key in ("alternates_dataset", "base_model", "budget_dataset", "peft_config")
    }
    own["holdout_dataset"] = settings.pop("holdout_dataset", HOLDOUT)
    data = ForgetRetainDataset(FORGET, RETAIN)
    return ROSUTrainer(model or tiny_llama(), config(folder, **settings), train_dataset=data, **own)


def weights(t: ROSUTrainer) -> torch.Tensor:
    t.train()
    return flat(t.model.parameters())


#: The methods that forget in every step and take nothing but forget and retain samples.
PLAIN = [
    name
    for name, rule in METHODS.items()
    if {"forget"} <= {*rule.passes} <= {"forget", "retain"} and not (rule.alternates or rule.sweeps)
]


@pytest.mark.parametrize("method", PLAIN)
def test_an_unreachable_target_changes_no_bit(method: str, tmp_path: Path) -> None:
    plain = weights(trainer(tmp_path / "a", method=method))
    assert torch.equal(weights(trainer(tmp_path / "b", method=method, forget_until=1e6)), plain)
    assert not torch.equal(weights(trainer(tmp_path / "c", method=method, forget_until=4.5)), plain)


def test_scrub_is_bounded_in_the_epochs_that_forget(tmp_path: Path) -> None:
    """Epochs of one step: keep, forget, keep. Where all is deep enough, the second one moves nothing."""
    shared: dict[str, Any] = {"method": "scrub", "scrub_max_epochs": 1, "per_device_train_batch_size": 8}
    shared |= {"max_steps": 3, "optim": "sgd", "weight_decay": 0.0, "learning_rate": 0.5}
    plain = weights(trainer(tmp_path / "a", **shared))
    bounded = trainer(tmp_path / "b", forget_until=1e6, **shared)
    assert torch.equal(weights(bounded), plain)
    assert ["depth/loss" in entry for entry in logs(bounded)] == [False, True, False]
    moved: list[torch.Tensor] = []

    class Note(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
            moved.append(flat(model.parameters()))

    deep = trainer(tmp_path / "c", forget_until=1e-6, **shared)
    deep.add_callback(Note())
    assert not torch.equal(weights(deep), plain)
    assert torch.equal(moved[0], moved[1]) and not torch.equal(moved[1], moved[2])


def test_scrub_with_an_adapter_looks_at_the_current_weights(tmp_path: Path) -> None:
    """Not at the pass of the teacher, which is the same module with its adapter off."""
    lora = pytest.importorskip("peft").LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    found: list[float] = []

    class Note(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
            model.eval()
            found.append(float(np.mean([np.mean(naive.token_losses(model, s)) for s in FORGET])))
            model.train()

    shared: dict[str, Any] = {"method": "scrub", "per_device_train_batch_size": 8, "max_steps": 4}
    shared |= {"learning_rate": 0.05, "lr_scheduler_type": "constant"}
    t = trainer(tmp_path, peft_config=lora, forget_until=50.0, **shared)
    t.add_callback(Note())
    t.train()
    initial = float(np.mean([np.mean(naive.token_losses(tiny_llama(), s)) for s in FORGET]))
    assert abs(found[2] - initial) > 1e-3
    assert logs(t)[3]["depth/loss"] == pytest.approx(found[2], rel=1e-5)  # float32 logits


def test_where_everything_is_deep_enough_only_the_retain_loss_is_lowered(tmp_path: Path) -> None:
    bounded = trainer(tmp_path / "a", method="graddiff", forget_until=1e-6)
    assert torch.equal(weights(bounded), weights(trainer(tmp_path / "b", method="graddiff", forget_weight=0.0)))
    assert all(entry["depth/reached"] == 1.0 for entry in logs(bounded))
    rosu = trainer(tmp_path / "c", forget_until=1e-6)
    rosu.train()
    assert all(entry["step/fallback"] == 1.0 for entry in logs(rosu))


@pytest.mark.parametrize("method", ["graddiff", "pcgrad", "rosu", "uam"])
def test_what_is_beyond_its_target_comes_back(method: str, tmp_path: Path) -> None:
    """All answers start beyond a target of 2: left alone they stay there; reversed or returned they end closer.

    UAM follows the retain gradient alone, which its perturbation bends only a little.
    """
    shared: dict[str, Any] = {"method": method, "forget_until": 2.0, "max_steps": 80, "learning_rate": 1e-2}
    ends = {}
    for beyond in BEYOND:
        t = trainer(tmp_path / beyond, forget_beyond=beyond, **shared)
        t.train()
        ends[beyond] = [float(np.mean(naive.token_losses(t.model, s))) for s in FORGET]
    assert min(ends["leave"]) > 3.0
    left, reversed_, returned = (np.mean(np.abs(np.subtract(ends[beyond], 2.0))) for beyond in BEYOND)
    assert returned < 0.5 * left and reversed_ < (1.0 if method == "uam" else 0.5) * left


@pytest.mark.parametrize(("method", "count"), [("rosu", 5), ("graddiff", 3), ("sam_npo", 4)])
def test_the_passes_over_what_returns_are_announced(
    method: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[None] = []
    backward = LocalSpace.backward
    monkeypatch.setattr(LocalSpace, "backward", lambda space, loss: (made.append(None), backward(space, loss)))
    settings = {"method": method, "forget_until": 4.3, "forget_beyond": "return", "max_steps": 1}
    t = trainer(tmp_path, gradient_accumulation_steps=1, **settings)
    t.train()
    assert t.preflight is not None
    assert len(made) == count == t.preflight.passes + t.preflight.returning
    assert f"{count} forward+backward passes" in t.preflight.line()


def test_holdout_targets_have_the_distribution_of_unseen_losses(tmp_path: Path) -> None:
    """The drawn targets, sorted, are evenly spaced quantiles of the losses a loop over tokens finds."""
    initial = tiny_llama()
    losses = [np.mean(naive.token_losses(initial, s)) for s in HOLDOUT]
    t = trainer(tmp_path, forget_until="holdout", max_steps=1)
    t.train()
    assert t._bound is not None
    found = sorted(value for (value,) in t._bound.targets.values.values())
    expected = np.quantile(losses, (np.arange(len(FORGET)) + 0.5) / len(FORGET))
    assert found == pytest.approx(expected.tolist(), rel=1e-5)  # float32 logits
    mean = trainer(tmp_path / "m", forget_until="holdout", forget_draw=False, max_steps=1)
    mean.train()
    assert mean._bound is not None
    assert [v for (v,) in mean._bound.targets.values.values()] == pytest.approx([np.mean(losses)] * 8, rel=1e-5)


@pytest.mark.parametrize(
    ("until", "level", "draw"),
    [
        ("holdout", "sequence", True),
        ("holdout", "both", True),
        ("holdout", "token", False),
        ("alternates", "sequence", False),
    ],
)
def test_refreshed_targets_are_those_of_a_run_that_begins_there(
    until: str, level: str, draw: bool, tmp_path: Path
) -> None:
    """At steps 0, 3 and 6 of 8 the level is that of the weights there; in between it stays."""
    shared: dict[str, Any] = {"forget_until": until, "forget_level": level, "forget_draw": draw, "max_steps": 8}
    shared |= {"learning_rate": 1e-2, "method": "graddiff", "alternates_dataset": ALTERNATES}
    t = trainer(tmp_path / "whole", forget_refresh=3, **shared)
    recorded, seen = Recorded(), []

    class Note(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            assert t._bound is not None
            seen.append(dict(t._bound.targets.values))

    t.add_callback(recorded)
    t.add_callback(Note())
    t.train()
    for step in (0, 3, 6):
        model = tiny_llama()
        torch.nn.utils.vector_to_parameters(recorded.weights[step].clone(), model.parameters())
        fresh = trainer(tmp_path / str(step), model=model, **{**shared, "max_steps": 1})
        fresh.train()
        assert fresh._bound is not None
        for key, values in fresh._bound.targets.values.items():
            assert seen[step][key] == pytest.approx(values, rel=1e-6)
    assert seen[0] == seen[2] != seen[3] == seen[5] != seen[6] == seen[7]


@pytest.mark.parametrize("until", ["off", "base", 4.5])
def test_targets_that_do_not_follow_the_weights_are_not_refreshed(until: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use 'holdout' or 'alternates', or forget_refresh=0"):
        trainer(tmp_path, forget_until=until, base_model=tiny_llama(7), forget_refresh=5)


def test_a_run_that_goes_back_measures_its_targets_anew(tmp_path: Path) -> None:
    """The look after step 4 returns to step 2: the next step has targets of those weights, also when resumed there."""
    settings: dict[str, Any] = {"forget_until": "holdout", "forget_refresh": 3, "budget": 0.5, "budget_every": 2}
    settings |= {"budget_dataset": RETAIN, "max_steps": 5, "learning_rate": 1e-2, "forget_draw": False}
    settings |= {"save_strategy": "steps", "save_steps": 4}
    found = []
    for checkpoint in (None, str(tmp_path / "checkpoint-4")):
        t = trainer(tmp_path, **settings)
        recorded = Recorded()
        t.add_callback(recorded)
        assert t._budget is not None and t._bound is not None
        looks = iter([1.0, 1.1, 2.0, 1.2])  # the last step is looked at, too
        t._budget._measure = lambda looks=looks: next(looks)  # type: ignore[misc]
        t.train(resume_from_checkpoint=checkpoint)
        assert t._budget.returned_at == 4
        found.append(t._bound.targets.values)
        if checkpoint is None:
            model = tiny_llama()
            torch.nn.utils.vector_to_parameters(recorded.weights[2].clone(), model.parameters())
            fresh = trainer(tmp_path / "fresh", model=model, forget_until="holdout", forget_draw=False, max_steps=1)
            fresh.train()
            assert fresh._bound is not None
            found.append(fresh._bound.targets.values)
    whole, truth, resumed = found
    assert resumed == whole
    for key, values in truth.items():
        assert whole[key] == pytest.approx(values, rel=1e-6)


def test_a_second_training_looks_for_similar_samples_among_its_own(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"forget_until": "holdout", "forget_level": "token", "forget_refresh": 1, "max_steps": 1}
    t = trainer(tmp_path / "a", **settings)
    t.train()
    weights_then = flat(t.model.parameters())
    t._holdout = t._holdout[:2]
    t.train()
    model = tiny_llama()
    torch.nn.utils.vector_to_parameters(weights_then.clone(), model.parameters())
    fresh = trainer(tmp_path / "b", model=model, **{**settings, "holdout_dataset": HOLDOUT[:2]})
    fresh.train()
    assert t._bound is not None and fresh._bound is not None
    for key, values in fresh._bound.targets.values.items():
        assert t._bound.targets.values[key] == pytest.approx(values, rel=1e-6)


def test_the_draw_follows_the_seed() -> None:
    assert drawn([1.0, 2.0, 5.0], 7, 3) == drawn([1.0, 2.0, 5.0], 7, 3)
    assert drawn([1.0, 2.0, 5.0], 7, 3) != drawn([1.0, 2.0, 5.0], 7, 4)


def test_alternates_and_base_targets_are_those_of_the_loop(tmp_path: Path) -> None:
    base, initial = tiny_llama(7), tiny_llama()
    key = {sample_keys(naive.padded([s], 14))[0]: i for i, s in enumerate(FORGET)}
    expected = {
        "alternates": [[np.mean([np.mean(naive.token_losses(initial, a)) for a in own])] for own in ALTERNATES],
        "base": [[np.mean(naive.token_losses(base, s))] for s in FORGET],
        "token": [naive.token_losses(base, s) for s in FORGET],
    }
    for kind, truth in expected.items():
        until, level = ("base", "token") if kind == "token" else (kind, "sequence")
        t = trainer(
            tmp_path / kind,
            forget_until=until,
            forget_level=level,
            alternates_dataset=ALTERNATES,
            base_model=base,
            max_steps=1,
        )
        t.train()
        assert t._bound is not None
        for name, values in t._bound.targets.values.items():
            assert values == pytest.approx(truth[key[name]], rel=1e-5), kind  # float32 logits


@pytest.mark.parametrize("refresh", [0, 3])
def test_targets_travel_with_checkpoints_and_resuming_is_exact(refresh: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"forget_until": "holdout", "save_strategy": "steps", "save_steps": 2}
    settings |= {"forget_refresh": refresh, "forget_level": "both"}
    whole = weights(trainer(tmp_path, model=tiny_llama(dropout=0.1), **settings))
    again = trainer(tmp_path, model=tiny_llama(dropout=0.1), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(flat(again.model.parameters()), whole)
    (tmp_path / "checkpoint-2" / "rosu_targets.safetensors").unlink()
    with pytest.raises(ConfigError, match="rosu_targets"):
        trainer(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_second_training_keeps_the_targets_of_the_first(tmp_path: Path) -> None:
    """The unlearned model says nothing about unseen data any more."""
    t = trainer(tmp_path, forget_until="holdout", learning_rate=1e-2)
    t.train()
    assert t._bound is not None
    targets, start = dict(t._bound.targets.values), t._bound.depth.start
    t.train()
    assert t._bound.targets.values == targets
    assert t._bound.depth.start == start


class Recorded(TrainerCallback):
    """The weights after every step, those before the first one at place 0."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights = [flat(kwargs["model"].parameters())]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights.append(flat(kwargs["model"].parameters()))


def naive_distance(vector: torch.Tensor, target: float, level: str) -> float:
    """Mean |T − ℓ| by a loop over samples and tokens."""
    model = tiny_llama()
    torch.nn.utils.vector_to_parameters(vector.to(next(model.parameters())), model.parameters())
    losses = [naive.token_losses(model, sample) for sample in FORGET]
    found = [x for own in losses for x in own] if level != "sequence" else [np.mean(own) for own in losses]
    return float(np.mean([abs(target - x) for x in found]))


@pytest.mark.parametrize("level", ["sequence", "token", "both"])
def test_the_closest_weights_are_kept(level: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "forget_until": 4.5, "forget_level": level, "keep_best": "depth", "budget_every": 2, "max_steps": 9,
        "learning_rate": 1e-2, "method": "graddiff", "forget_margin": 0.01, "save_strategy": "steps", "save_steps": 3,
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    t, recorded = trainer(tmp_path, **settings), Recorded()
    t.add_callback(recorded)
    t.train()
    assert t._best is not None
    looks = {at: naive_distance(recorded.weights[at], 4.5, level) for at in (0, 2, 4, 6, 8, 9)}
    best = min(looks, key=lambda at: looks[at])
    assert 0 < best < 9, looks  # the test says something: it overshoots
    assert t._best.noted_at == best
    assert t._best.distance == pytest.approx(looks[best], rel=1e-4)  # float32 logits
    assert torch.equal(flat(t.model.parameters()), recorded.weights[best])
    logged = [entry["depth/distance"] for entry in t.state.log_history if "depth/distance" in entry]
    assert logged == pytest.approx([looks[at] for at in (2, 4, 6, 8)], rel=1e-4)
    again = trainer(tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert torch.equal(flat(again.model.parameters()), flat(t.model.parameters()))
    ended = trainer(tmp_path, **settings)  # nothing is left to do but to put them back
    ended.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    assert torch.equal(flat(ended.model.parameters()), flat(t.model.parameters()))
    (tmp_path / "checkpoint-3" / "rosu_best_0.safetensors").unlink()
    with pytest.raises(ConfigError, match="rosu_best_0"):
        trainer(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


class Streamed(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Pairs without a length."""

    def __iter__(self) -> Any:
        return iter(ForgetRetainDataset(FORGET, RETAIN))


def test_the_closest_weights_are_not_looked_for_in_streamed_data(tmp_path: Path) -> None:
    settings = config(tmp_path, forget_until=4.5, keep_best="depth", max_steps=2)
    with pytest.raises(DataError, match=r"keep_best='depth' computes values of each sample .* keep_best 'off'"):
        ROSUTrainer(tiny_llama(), settings, train_dataset=Streamed()).train()


@pytest.mark.parametrize("off", [False, "no", "off"])
def test_off_is_off_however_yaml_reads_it(off: Any, tmp_path: Path) -> None:
    made = config(tmp_path, keep_best=off, forget_until=off, calibrate=off)
    assert (made.keep_best, made.forget_until, made.calibrate) == ("off", "off", "off")


def test_adapters_are_bounded_too(tmp_path: Path) -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    t = trainer(tmp_path, peft_config=lora, forget_until="holdout", forget_margin=0.2)
    t.train()
    assert 0.0 < np.mean([entry["depth/reached"] for entry in logs(t)]) < 1.0


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"keep_best": "depth"}, ConfigError, "needs targets"),
        ({"keep_best": "deep", "forget_until": 2.0}, ConfigError, "deep"),
        ({"forget_until": "holdout", "holdout_dataset": None}, DataError, "holdout_dataset=…"),
        ({"forget_until": "holdout", "holdout_dataset": []}, DataError, "empty"),
        ({"forget_until": "base"}, ConfigError, "base_model=…"),
        ({"forget_until": "base", "base_model": "no/such/folder"}, ConfigError, "could not be loaded"),
        ({"forget_until": "base", "base_model": tiny_llama(vocab_size=80)}, ConfigError, "vocabulary of 80 tokens"),
        ({"forget_until": "alternates"}, DataError, "alternates_dataset=…"),
        ({"forget_until": "alternates", "alternates_dataset": ALTERNATES[:3]}, DataError, "3 lists .* 8 forget"),
        ({"forget_until": "alternates", "alternates_dataset": [*ALTERNATES[:7], []]}, DataError, "7 lists"),
        ({"forget_until": "deep"}, ConfigError, "'holdout'"),
        ({"forget_until": -1.0}, ConfigError, "positive"),
        ({"forget_until": float("nan")}, ConfigError, "positive"),
        ({"forget_until": 2.0, "forget_margin": 0.0}, ConfigError, "forget_margin=0.0"),
        ({"forget_until": "alternates", "forget_level": "token"}, ConfigError, "for every token"),
        ({"forget_until": "alternates", "forget_level": "both"}, ConfigError, "forget_level='both' needs"),
        ({"forget_until": 2.0, "forget_level": "word"}, ConfigError, "forget_level"),
        ({"forget_until": 2.0, "forget_beyond": "raise"}, ConfigError, "forget_beyond"),
        ({"forget_beyond": "return", "method": "graddiff"}, ConfigError, "set forget_until"),
        ({"forget_level": "words"}, ConfigError, "forget_level"),
        ({"forget_until": "holdout", "forget_refresh": -1}, ConfigError, "at least 1 step, or 0"),
        (
            {"forget_until": "holdout", "forget_refresh": 2, "keep_best": "depth"},
            ConfigError,
            "moves these",
        ),
        ({"forget_margin": -1.0}, ConfigError, "forget_margin=-1.0"),
        ({"forget_until": 2.0, "forget_beyond": "return", "method": "ng"}, ConfigError, "'ng' has none in the steps"),
        ({"forget_until": 2.0, "forget_beyond": "return", "method": "scrub"}, ConfigError, "'scrub' has none in the"),
        ({"forget_until": 2.0, "method": "ft"}, ConfigError, "forgets nothing"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_trained(
    settings: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        trainer(tmp_path, **settings)


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_held_out_samples_without_answers_are_named(level: str, tmp_path: Path) -> None:
    empty = [naive.unanswered([4, 5, 6])]
    with pytest.raises(DataError, match="holdout_dataset has samples without any answer"):
        trainer(tmp_path, forget_until="holdout", forget_level=level, holdout_dataset=empty).train()


def test_a_forget_sample_without_an_answer_takes_no_part(tmp_path: Path) -> None:
    data = ForgetRetainDataset([*FORGET[:3], naive.unanswered([4, 5, 6])], RETAIN)
    for level in ("sequence", "token"):
        made = config(tmp_path / level, forget_until="base", forget_level=level, max_steps=2)
        t = ROSUTrainer(tiny_llama(), made, train_dataset=data, base_model=tiny_llama(7))
        t.train()
        assert all("depth/reached" in entry for entry in logs(t))


def test_where_nothing_is_left_to_forget_a_run_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As with a base model that has learned the data, too."""
    same = trainer(tmp_path / "a", forget_until="base", base_model=tiny_llama(), max_steps=2)
    for t, said in ((trainer(tmp_path / "b", forget_until=1e6, max_steps=2), 0), (same, 1)):
        caplog.clear()
        t.train()
        assert caplog.text.count("at their targets already") == said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"forget_level": "token"}, "forget_level='token' has no effect with forget_until='off'"),
        ({"forget_margin": 2.0}, "forget_margin=2.0 has no effect with forget_until='off'"),
        ({"budget_every": 5}, "budget_every=5 has no effect with budget=None"),
        ({"budget_tries": 5}, "budget_tries=5 has no effect with budget=None"),
        ({"rho_share": 0.2}, "rho_share=0.2 has no effect with rho=0.4"),
        ({"forget_until": 2.0, "keep_best": "depth", "budget_every": 5, "forget_level": "token"}, ""),
    ],
)
def test_settings_that_do_nothing_are_named(
    settings: dict[str, Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path, **settings)
    assert message in caplog.text and ("no effect" in caplog.text) == bool(message)


# -- against loops that share nothing with the code -----------------------------------------------


def naive_alignment(other: list[int], answer: list[int]) -> list[tuple[str, list[int], list[int]]]:
    """Ratcliff and Obershelp: the longest common run, the earliest of several, then the same on both sides of it."""
    best = (0, 0, 0)
    for i in range(len(other)):
        for j in range(len(answer)):
            size = 0
            while i + size < len(other) and j + size < len(answer) and other[i + size] == answer[j + size]:
                size += 1
            if size > best[0]:
                best = (size, i, j)
    size, i, j = best
    if not size:
        return [("else", list(range(len(other))), list(range(len(answer))))]
    left, right = naive_alignment(other[:i], answer[:j]), naive_alignment(other[i + size :], answer[j + size :])
    right = [(kind, [i + size + at for at in a], [j + size + at for at in b]) for kind, a, b in right]
    return [*left, ("same", list(range(i, i + size)), list(range(j, j + size))), *right]


def naive_counterparts(answer: list[int], other: list[int], losses: list[float]) -> list[float]:
    values = [float(np.mean(losses))] * len(answer)
    for kind, theirs, own in naive_alignment(other, answer):
        for at, position in enumerate(own):
            if kind == "same":
                values[position] = losses[theirs[at]]
            elif theirs:
                values[position] = float(np.mean([losses[i] for i in theirs]))
    return values


def test_every_token_gets_the_loss_of_what_stands_in_its_place() -> None:
    values = counterparts([1, 7, 2, 3, 8, 9], [1, 5, 6, 2, 3, 4], [0.1, 2.0, 4.0, 0.2, 0.3, 5.0])
    assert values == [0.1, 3.0, 0.2, 0.3, 5.0, 5.0]
    assert counterparts([1, 7, 2], [1, 2], [1.0, 3.0]) == [1.0, 2.0, 3.0]  # nothing there: the mean of all
    generator = np.random.default_rng(0)
    for _ in range(200):
        answer, other = (generator.integers(0, 4, generator.integers(1, 9)).tolist() for _ in range(2))
        losses = generator.random(len(other)).tolist()
        assert counterparts(answer, other, losses) == pytest.approx(naive_counterparts(answer, other, losses))


def test_token_targets_are_those_of_the_five_most_similar_samples_and_their_equals(tmp_path: Path) -> None:
    model, sizes = tiny_llama(), []
    unseen = [*samples(12, seed=77), *samples(3, seed=78)]
    unseen += [{**s, "input_ids": [*s["input_ids"][1::-1], *s["input_ids"][2:]]} for s in unseen]  # as similar
    answer_of = [[label for label in s["labels"] if label != -100] for s in unseen]
    expected = []
    for sample in FORGET:
        words = set(sample["input_ids"])
        likeness = [len(words & set(s["input_ids"])) / len(words | set(s["input_ids"])) for s in unseen]
        near = [i for i, own in enumerate(likeness) if sum(other > own for other in likeness) < 5]
        answer = [label for label in sample["labels"] if label != -100]
        rows = [naive_counterparts(answer, answer_of[i], naive.token_losses(model, unseen[i])) for i in near]
        expected.append(np.mean(rows, axis=0))
        sizes.append(len(near))
    assert min(sizes) >= 5 and max(sizes) > 5  # there are equals
    settings: dict[str, Any] = {"forget_until": "holdout", "forget_level": "token", "forget_draw": False}
    for name, data in (("as_listed", unseen), ("reversed", unseen[::-1])):
        t = trainer(tmp_path / name, holdout_dataset=data, max_steps=1, **settings)
        t.train()
        assert t._bound is not None
        for sample, truth in zip(FORGET, expected, strict=True):
            (key,) = sample_keys(naive.padded([sample], 14))
            assert t._bound.targets.values[key] == pytest.approx(truth, rel=1e-5), name  # float32 logits


def test_samples_without_a_mask_have_no_padding() -> None:
    batch = naive.padded([FORGET[0]], len(FORGET[0]["input_ids"]))
    bare = {name: value for name, value in batch.items() if name != "attention_mask"}
    assert list(_tokens(bare)) == list(_tokens(batch))


def test_answers_to_similar_questions_stand_in_for_alternates() -> None:
    forget = [("where was Ada Lark born", "Riga")]
    retain = [
        ("what does Ada like", "tea"),
        ("where was Bo Finch born", "Oslo"),
        ("who", "Cy"),
        ("where was Ada Lark born", "Riga"),  # the true answer is no alternate
        ("where was Dee Wren", "Bonn"),
        ("where is it", "here"),
        ("Where WAS born", "Rome"),
    ]
    # words shared of all: 3/5, 3/7, 2/7, 1/7, 1/8, 0
    assert [text for _, text in nearest_alternates(forget, retain)[0]] == ["Rome", "Oslo", "Bonn", "here", "tea"]


def test_equally_similar_answers_are_dealt_to_the_questions() -> None:
    forget = [(f"where was F{i} born", "Riga") for i in range(20)]
    retain = [(f"where was R{i} born", f"city {i}") for i in range(40)]
    found = nearest_alternates(forget, retain)
    assert all(len({text for _, text in own}) == 5 for own in found)
    assert len({text for own in found for _, text in own}) > 30  # each missed by 20 draws of 5 of 40 with odds of 1:14
    assert found == nearest_alternates(forget, retain)


def test_what_is_set_aside_for_the_budget_is_not_trained_on(tmp_path: Path) -> None:
    """From a recipe: the trainer's retain samples and its budget samples are all of retain_data, none twice."""
    values = {**toy_values({}, tmp_path), "budget": 0.1, "output_dir": str(tmp_path / "out")}
    values.pop("budget_data", None)
    made = prepare(build(values))
    trained = [tuple(s["input_ids"]) for s in made.trainer.train_dataset.retain]
    aside = [tuple(s["input_ids"]) for s in made.trainer._budget_data]
    assert len(aside) >= 2 and not {*aside} & {*trained}
    assert sorted([*trained, *aside]) == sorted(tuple(s["input_ids"]) for s in made.loaded.retain)


@pytest.mark.parametrize(("rows", "kept"), [(4, 2), (5, 2), (40, 2), (100, 5)])
def test_some_retain_samples_are_set_aside_for_the_budget(rows: int, kept: int) -> None:
    from rosu_llm.recipes.next_token import _set_aside

    trained, aside = _set_aside(list(range(rows)))
    assert len(aside) == kept
    assert sorted([*trained, *aside]) == list(range(rows))
