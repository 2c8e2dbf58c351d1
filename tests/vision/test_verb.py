"""``rosu vision``: rows of a table, kept cells, selection on validation images, and a light import."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from rosu_llm import ROSUConfig
from rosu_llm.analysis.orthogonality.samples import draw_pair
from rosu_llm.cli.main import main
from rosu_llm.errors import ConfigError, DataError
from rosu_llm.experiments.attempt import Unobserved, train_quietly
from rosu_llm.presentation.vision import vision_section, write_vision
from rosu_llm.vision.ablate import run_ablation, vision_grid
from rosu_llm.vision.batches import ImagePairs, normalised
from rosu_llm.vision.diagnose import audit_vision, orthogonality_plan
from rosu_llm.vision.fit import QUIET
from rosu_llm.vision.metrics import predictions
from rosu_llm.vision.rows import PAPER_ROWS, ROWS, TRIALS, default_settings, given_settings, trials
from rosu_llm.vision.settings import VisionArguments, VisionConfig, build_vision, complete_vision
from rosu_llm.vision.table import dataset_name, paper_figures, run_table
from rosu_llm.vision.task import VisionTask
from rosu_llm.vision.toy import toy_images, toy_settings
from tests.conftest import ROOT

CONFIGS = sorted((ROOT / "configs" / "vision").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_vision_recipe_is_parsed(path: Path) -> None:
    from rosu_llm.recipes.settings import read_config

    arguments, config = build_vision({**read_config(path), "bf16": False, "use_cpu": True})
    assert config.momentum == 0.9 and config.weight_decay == 5e-4 and arguments.retain_batch_size == 128


@pytest.mark.parametrize("protocol", ["classwise", "random"])
def test_every_row_has_the_same_number_of_trials_and_each_can_be_built(protocol: str) -> None:
    for name in ROWS:
        own = trials(name, protocol)
        assert len(own) == TRIALS == len({json.dumps(each, sort_keys=True) for each in own})
        assert len(trials(name, protocol, 3)) == 3
        for each in own[:: TRIALS - 1]:
            build_vision({"data": "x", "use_cpu": True, "output_dir": "unused", **each})
    assert set(PAPER_ROWS) == set(paper_figures("tables", "cifar10", protocol)) - {"retrain"}


def test_the_papers_figures_add_up() -> None:
    """ΔAcc is the sum of the differences to Retrain of the printed means, but for rounding."""
    for dataset in ("cifar10", "cifar100", "tiny-imagenet"):
        for protocol in ("classwise", "random"):
            rows = paper_figures("tables", dataset, protocol)
            for name, row in rows.items():
                total = sum(abs(row[key][0] - rows["retrain"][key][0]) for key in ("RA", "FA", "TA"))
                assert row["delta"] == pytest.approx(total, abs=0.021), (dataset, protocol, name)
    assert paper_figures("components", "cifar10", "random")["βδ only"]["delta"] == 285.64


def test_the_papers_figures_stand_beside_the_papers_data_sets_alone() -> None:
    many = [str(i) for i in range(100)]
    assert dataset_name("/x/CIFAR-100-dataset", many) == "cifar100"
    assert dataset_name("cifar-10-batches-py", many[:10]) == dataset_name("uoft-cs/cifar10", many[:10]) == "cifar10"
    for data, classes in (("mnist", many[:10]), ("mine", many), ("mine", many * 2), ("cifar10", many[:7])):
        assert dataset_name(data, classes) is None
    assert dataset_name("cifar10.1", many[:10]) is None
    animals = "airplane automobile bird cat deer dog frog horse ship truck".split()
    assert dataset_name("folder", animals) == "cifar10" and dataset_name("folder", animals[:9]) is None


def test_what_the_user_fixes_no_row_changes() -> None:
    given = given_settings({"rho": "7e-1", "num_train_epochs": 2, "width": 4}, ["rosu", "ft"])
    assert given == {"rho": 0.7, "num_train_epochs": 2}
    with pytest.raises(ConfigError, match="--methods NAME"):
        given_settings({"method": "rosu"}, ["rosu"])
    for count in (8, 2):  # a search varies what is left
        tried = trials("rosu", "random", count, {"rho": 0.7, "num_train_epochs": 2})
        assert [(own["learning_rate"], own["rho"]) for own in tried] == [(0.01, 0.7), (0.03, 0.7)]
    assert trials("uam", "random", 8, {"rho": 0.123, "learning_rate": 0.007}) == [
        {"method": "uam", "rho": 0.123, "learning_rate": 0.007}
    ]
    grid = vision_grid("retain_batch", "random", {"retain_batch_size": 32})
    assert [v.settings["retain_batch_size"] for v in grid.variants] == [16, 32, 64, 128]
    for given, amplify in (({}, "direct"), ({"amplify": "auto"}, "direct"), ({"amplify": "optimizer"}, "optimizer")):
        grid = vision_grid("components", "random", {**given, "rho": "0.3"})
        assert {(v.settings["amplify"], v.settings["rho"]) for v in grid.variants} == {(amplify, 0.3)}
    for name, key, value in (
        ("rho", "rho", 0.3),
        ("jacobian", "jacobian", "exact"),
        ("components", "amplify", "matched"),
    ):
        with pytest.raises(ConfigError, match=f"the grid '{name}' sets {key} itself"):
            vision_grid(name, "random", {key: value})


def test_a_row_that_several_grids_have_is_one_cell() -> None:
    """ROSU itself, and its zero-order form, are written differently in the two grids."""
    grids = {name: vision_grid(name, "random", {}) for name in ("components", "jacobian")}
    settings = {name: [complete_vision(v.settings) for v in grid.variants] for name, grid in grids.items()}
    assert settings["components"][:2] == settings["jacobian"][:2]
    every = {repr(own) for rows in settings.values() for own in rows}
    assert len(every) == 4 + 5 - 2


def test_a_list_is_what_a_search_tries_in_place_of_the_rows_own() -> None:
    written: tuple[Any, ...] = ("[0.1, 2e-1, 0.1]", [0.1, "2e-1"])  # as a flag, and from a file
    for values in written:
        given = given_settings({"rho": values, "num_train_epochs": 2}, ["rosu", "ft"], search=True)
        assert given == {"rho": (0.1, 0.2), "num_train_epochs": 2}
        tried = [(own["learning_rate"], own["rho"]) for own in trials("rosu", "random", 8, given)]
        assert tried == [(0.01, 0.1), (0.01, 0.2), (0.03, 0.1), (0.03, 0.2)]
        assert default_settings("rosu", "random", given)["rho"] == 0.2
        assert all("rho" not in own for own in trials("ft", "random", 8, given))
        with pytest.raises(ConfigError, match="has several values, which only rosu vision table tries"):
            given_settings({"rho": values}, ["rosu"])
        with pytest.raises(ConfigError, match="in rows that search rho"):
            given_settings({"rho": values}, ["ft"], search=True)
    for values, words in (([], "leaves nothing to try"), ([0.1, 0.2, 0.3, 0.4, 0.5], "make 10 combinations for rosu")):
        with pytest.raises(ConfigError, match=words):
            given_settings({"rho": values}, ["rosu"], search=True)


@pytest.mark.parametrize("augment", [True, False])
def test_augmentation_is_off_for_all_training_or_none(
    augment: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    class Watched(ImagePairs):
        def __init__(self, *parts: Any, augment: bool = True, **more: Any) -> None:
            seen.append(augment)
            super().__init__(*parts, augment=augment, **more)

    monkeypatch.setattr("rosu_llm.vision.fit.ImagePairs", Watched)
    toy = VisionTask({**toy_settings({"protocol": "random"}), "augment": augment}, tmp_path / "models", toy_images())
    document = run_table(toy, ["rosu"], [0], tmp_path, Unobserved())
    assert seen == [augment] * 3 and not document["rows"][-1]["errors"]  # learned, retrained, unlearned
    with pytest.raises(ConfigError, match="augment belongs to the task"):
        toy.check([{"augment": not augment}], [0])


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> VisionTask:
    values = toy_settings({"protocol": "random"})
    return VisionTask(values, tmp_path_factory.mktemp("vision") / "models", toy_images())


def test_a_table_selects_on_validation_images_and_keeps_its_cells(task: VisionTask, tmp_path: Path) -> None:
    seen: list[str] = []

    class Watching(Unobserved):
        def finished(self, label: str, status: str, text: str) -> None:
            seen.append(status)

    search, settings = (2, 9), {"num_train_epochs": 1}
    document = run_table(task, ["iu", "l1_sparse"], [0, 1], tmp_path, Watching(), search=search, settings=settings)
    assert set(seen) == {"done"}
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == ["before", "retrain", "iu", "l1_sparse"]
    assert rows["retrain"]["figures"]["delta"]["mean"] == 0.0
    assert rows["retrain"]["figures"]["minutes"]["mean"] > 0.0  # also where another row had it trained
    for name in ("iu", "l1_sparse"):
        tried = rows[name]["trials"]
        best = min(tried, key=lambda trial: trial["validation_delta"])
        assert rows[name]["selected"] == best["settings"] and len(tried) == 2
        figures, gold = rows[name]["figures"], rows["retrain"]["figures"]
        total = sum(abs(figures[key]["mean"] - gold[key]["mean"]) for key in ("RA", "FA", "TA"))
        assert figures["delta"]["mean"] == pytest.approx(total) and figures["RA"]["count"] == 2
    seen.clear()
    again = run_table(task, ["iu", "l1_sparse"], [0, 1], tmp_path, Watching(), search=search, settings=settings)
    assert set(seen) == {"kept"} and again == document
    with pytest.raises(ConfigError, match="--search-seed 1 is among --seeds"):
        run_table(task, ["iu"], [0, 1], tmp_path, Unobserved(), search=(1, 1))


def test_a_given_setting_is_the_searches_own(task: VisionTask, tmp_path: Path) -> None:
    given = given_settings({"rho": 0.123, "learning_rate": 0.007}, ["uam"])
    document = run_table(task, ["uam"], [0], tmp_path, Unobserved(), search=(8, 9), settings=given)
    row = document["rows"][-1]
    assert row["selected"] == {"method": "uam", "rho": 0.123, "learning_rate": 0.007} and len(row["trials"]) == 1
    kept = [json.loads(path.read_text())["settings"] for path in (tmp_path / "cells").glob("*.json")]
    assert {(own["rho"], own["learning_rate"]) for own in kept if "rho" in own} == {(0.123, 0.007)}


def test_a_failed_cell_is_run_again_when_asked(
    task: VisionTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError("no space left")

    with monkeypatch.context() as during:
        during.setattr(task, "_edit", full)
        rows = run_table(task, ["ff"], [0], tmp_path, Unobserved())["rows"]
        assert rows[-1]["errors"] == ["seed 0: OSError: no space left"]
    assert run_table(task, ["ff"], [0], tmp_path, Unobserved())["rows"] == rows
    again = run_table(task, ["ff"], [0], tmp_path, Unobserved(), retry_failed=True)["rows"][-1]
    assert not again["errors"] and again["figures"]["RA"]["count"] == 1


@pytest.mark.parametrize("action", ["table", "ablate"])
def test_without_scikit_learn_nothing_is_trained(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.svm", None)
    assert main(["vision", action, "--smoke", "--protocol", "random", "--out", str(tmp_path)]) != 0
    assert "pip install rosu-llm[vision]" in capsys.readouterr().err and not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("values", "seeds", "words"),
    [
        ({"forget_class": 77}, [0], "forget_class=77 does not exist: there are 3 classes"),
        ({}, [0, 3], "seed 3 is a class"),
        ({"pretrain_batch_size": 1}, [0], "^pretrain_batch_size=1: BatchNorm .* at least 2.$"),
        ({"pretrain_batch_size": 70}, [0], "pretrain_batch_size=70, and 54 images are kept"),
        ({"forget_batch_size": 1}, [0], "^forget_batch_size=1: BatchNorm .* batch_norm='eval'"),
        ({"retain_batch_size": 1}, [0], "^retain_batch_size=1: BatchNorm"),
        ({"forget_batch_size": 6, "retain_batch_size": 8}, [0], "one must be a multiple of the other"),
        ({"forget_batch_size": 64, "retain_batch_size": 64}, [0], "retain_batch_size=64, and 54 images are kept"),
        ({"model": "resnet19"}, [0], "Unknown model"),
        ({"forget_share": 0.001, "protocol": "random"}, [0], "forget split is empty"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_trained(
    values: dict[str, Any], seeds: list[int], words: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, DataError), match=words):
        VisionTask({**toy_settings({"protocol": "classwise"}), **values}, tmp_path, toy_images(), seeds=seeds)
    assert not list(tmp_path.iterdir())


def test_a_search_is_on_another_class_than_its_table(tmp_path: Path) -> None:
    settings = toy_settings({"protocol": "classwise"})
    one = VisionTask({**settings, "forget_class": 2}, tmp_path, toy_images())
    with pytest.raises(ConfigError, match="forget_class=2 would be forgotten in the search and in the table"):
        run_table(one, ["rosu"], [0], tmp_path, Unobserved(), search=(1, 1))
    task = VisionTask(settings, tmp_path, toy_images())
    with pytest.raises(ConfigError, match="seed 9 is a class"):
        run_table(task, ["rosu"], [0], tmp_path, Unobserved(), search=(1, 9))
    none = VisionTask({**settings, "validation_share": 0.001}, tmp_path, toy_images())
    with pytest.raises(ConfigError, match="leaves no images to choose"):
        run_table(none, ["rosu"], [0], tmp_path, Unobserved(), search=(1, 1))


def test_models_are_measured_where_they_are_trained(task: VisionTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is read from its folder is on the CPU."""
    model, moved = task.bench.learned(lambda done, total: None), []
    monkeypatch.setattr(model, "to", moved.append)
    task.bench.measure(model, task.bench.split(0))
    assert moved == [task.bench.device] == [torch.device("cpu")]


class Time:
    """A clock that is put forward by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def step(self, done: int, total: int) -> None:
        self.now += 1.0


def test_minutes_are_of_the_steps_without_the_curve(
    task: VisionTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time()

    def slow(*arguments: Any) -> Any:
        time.now += 1000.0
        return predictions(*arguments)

    monkeypatch.setattr("rosu_llm.vision.clock.time", time)
    monkeypatch.setattr("rosu_llm.vision.task.predictions", slow)
    curved = VisionTask(task.base, task.bench.folder, toy_images(), curves=True)
    started = curved.start(task.base, 0, tmp_path, lambda done, total: None)
    train_quietly(started.trainer, time.step)
    assert time.now > 4000.0  # two parts, before the first step and after the epoch
    assert started.measure()["minutes"] == pytest.approx(started.trainer.state.global_step / 60.0)


def test_the_model_before_unlearning_is_the_same_for_all_seeds_and_never_saw_validation(task: VisionTask) -> None:
    splits = [task.bench.split(seed) for seed in (0, 1)]
    assert len(list(task.bench.folder.glob("learned-*"))) <= 1
    for split in splits:
        held = set(split.validation.tolist())
        assert held == set(splits[0].validation.tolist())
        assert not held & set(split.forget.tolist()) and not held & set(split.retain.tolist())


def test_training_that_was_interrupted_goes_on_and_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time()
    monkeypatch.setattr("rosu_llm.vision.clock.time", time)

    def bench(folder: Path) -> Any:
        settings = {**toy_settings({}), "pretrain_epochs": 3}
        return VisionTask(settings, folder, toy_images()).bench

    def stop(done: int, total: int) -> None:
        time.step(done, total)
        if done == 8:  # in the second of three epochs of five steps
            raise KeyboardInterrupt

    first = bench(tmp_path / "whole")
    whole = first.learned(time.step)
    assert first.seconds["learned"] == 15.0
    with pytest.raises(KeyboardInterrupt):
        bench(tmp_path / "parts").learned(stop)
    taken: list[int] = []

    def go_on(done: int, total: int) -> None:
        time.step(done, total)
        taken.append(done)

    resumed = bench(tmp_path / "parts")
    again = resumed.learned(go_on)
    assert resumed.seconds["learned"] == 15.0  # one per step; the three that were lost and made again count once
    assert taken[0] == 6 and taken[-1] == 15
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    kept = bench(tmp_path / "parts")
    read = kept.learned(stop)  # is there: nothing is trained
    assert kept.seconds["learned"] == 15.0
    assert torch.equal(read.state_dict()["head.weight"], whole.state_dict()["head.weight"])


def test_a_refreshed_memory_is_the_gradient_of_all_retain_images(task: VisionTask, tmp_path: Path) -> None:
    values = {**task.base, "protect": "both", "memory_refresh": 2, "output_dir": str(tmp_path), **QUIET}
    arguments, config = build_vision(values)
    model, split = task.bench.learned(lambda done, total: None), task.bench.split(0)
    twin = copy.deepcopy(model).eval()
    trainer = task.bench.unlearner(model, split, arguments, config)
    seen: list[Any] = []
    refresh = trainer._refresh_memory

    def look(step: Any) -> None:
        refresh(step)
        seen.append([t.clone() for t in step.space.memory["m"]])

    trainer._refresh_memory = look  # type: ignore[method-assign]
    trainer.train()
    kept = task.bench.train.take(split.retain)
    loss = functional.cross_entropy(twin(normalised(kept.pixels, *task.bench.statistics)).logits, kept.labels)
    for mine, truth in zip(seen[0], torch.autograd.grad(loss, list(twin.parameters())), strict=True):
        assert torch.allclose(mine, truth, rtol=1e-3, atol=1e-5)
    assert len(seen) == -(-trainer.state.global_step // 2)


def test_the_orthogonality_of_images_against_plain_gradients(task: VisionTask, tmp_path: Path) -> None:
    """ε_orth and its bound of every pair, from batch gradients of a twin in evaluation mode."""
    split = task.bench.split(0)
    plan = orthogonality_plan(task.bench, seed=0, pairs=3, batch_sizes=(4, 16))
    document = audit_vision(task.bench, plan, tmp_path, lambda *_: None)
    assert audit_vision(task.bench, plan, tmp_path, lambda *_: None) == document  # from its file
    assert orthogonality_plan(task.bench, seed=0).sizes == (1, 2, 4, 8, 16, 32, 64)  # of 72 images
    for asked, words in (({"batch_sizes": (1000,)}, "--batch-sizes 1000 does not fit"), ({"pairs": 0}, "--pairs 0")):
        with pytest.raises(ConfigError, match=words):
            orthogonality_plan(task.bench, seed=0, **asked)
    assert document is not None and document["retain_samples"] == len(split.retain)
    twin = task.bench.learned(lambda done, total: None).double().eval()
    train = task.bench.train

    def gradient(rows: torch.Tensor) -> torch.Tensor:
        pixels = normalised(train.pixels[rows], *task.bench.statistics).double()
        loss = functional.cross_entropy(twin(pixels).logits, train.labels[rows])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(twin.parameters()))])

    whole = gradient(split.retain)
    for cell in document["cells"]:
        for pair in range(3):
            size = cell["retain_batch_size"]
            forget_batch = document["forget_batch_size"]
            forget, retain = draw_pair(0, pair, (len(split.forget), forget_batch), (len(split.retain), size))
            f, r = gradient(split.forget[forget]), gradient(split.retain[retain])
            q = f - (f @ r) / (r @ r) * r
            error = float((whole @ q).abs() / (whole.norm() * q.norm()))
            assert cell["samples"]["eps_orth"][pair] == pytest.approx(error, rel=1e-3, abs=1e-6)
            bound = float((whole - r).norm() / whole.norm())
            assert cell["samples"]["bound"][pair] == pytest.approx(bound, rel=1e-4)


def test_every_setting_of_vision_is_documented() -> None:
    page = (ROOT / "docs" / "vision.md").read_text(encoding="utf-8")
    own = {f.name for f in dataclasses.fields(VisionConfig)} - {f.name for f in dataclasses.fields(ROSUConfig)}
    for name in {*own, *(f.name for f in dataclasses.fields(VisionArguments)), *ROWS}:
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("action", ["run", "diagnose", "audit"])
def test_the_verb_runs_at_toy_size(action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs/vision/cifar10_cpu.yaml")
    assert main(["vision", action, "--config", config, "--protocol", "random", "--smoke", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    if action == "run":
        content: dict[str, Any] = json.loads((tmp_path / "vision_run_random.json").read_text())
        assert [row["name"] for row in content["rows"]] == ["before", "retrain", "rosu"]
        assert "ROSU" in shown and (tmp_path / "run_random.tex").is_file()
    elif action == "audit":
        found = json.loads((tmp_path / "random" / "seed0" / "audit_orthogonality.json").read_text())
        assert [cell["retain_batch_size"] for cell in found["cells"]] == [2, 8] and "ε_orth" in shown
        assert (tmp_path / "random" / "seed0" / "audit_orthogonality.png").is_file()
    else:
        found = json.loads((tmp_path / "random" / "diagnosis.json").read_text())
        assert found["full_batch"]["curve"] and "over all samples" in shown


def test_an_ablation_has_a_curve_by_epoch_that_ends_at_its_figures(tmp_path: Path) -> None:
    values = {**toy_settings({"protocol": "random"}), "num_train_epochs": 2}
    toy = VisionTask(values, tmp_path / "models", toy_images(), curves=True)
    grid = vision_grid("components", "random", {"num_train_epochs": 2})
    grid = dataclasses.replace(grid, variants=grid.variants[:1])
    document = run_ablation(toy, grid, [0, 1], tmp_path, Unobserved())
    before, _, row = document["rows"]
    assert [point[0] for point in row["curve"]["FA"]] == [0.0, 1.0, 2.0]
    for name in ("RA", "FA"):
        assert row["curve"][name][0][1] == pytest.approx(before["figures"][name]["mean"])
        _, mean, spread = row["curve"][name][-1]
        assert mean == pytest.approx(row["figures"][name]["mean"]) and spread == pytest.approx(
            row["figures"][name]["std"]
        )
    written = write_vision(document, vision_section(document, grid.title, "components_random"), tmp_path / "out")
    assert {path.name for path in written} >= {"components_random.md", "components_random_epochs.png"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--smoke", "--methods", "rosa"], "Did you mean 'rosu'"),
        (["run", "--data", "/nowhere/at/all"], "is no file or folder"),
        (["table", "--smoke", "--trials", "9"], "every method has 8"),
        (["ablate", "--smoke", "--grid", "ranks", "--protocol", "random"], "Did you mean 'rank'"),
        (["run", "--smoke", "--method", "uam"], "--methods NAME"),
        (["ablate", "--smoke", "--grid", "components,typo"], "Unknown grid"),
        (["ablate", "--smoke", "--protocol", "randon"], "Did you mean 'random'"),
        (["ablate", "--smoke", "--method", "uam"], "--methods NAME"),
        (["run", "--smoke", "--trials", "0"], "--trials belongs to rosu vision table, not to run"),
        (["run", "--smoke", "--grid", "rank"], "--grid belongs to rosu vision ablate"),
        (["diagnose", "--smoke", "--methods", "ft"], "--methods belongs to rosu vision run and table"),
        (["diagnose", "--smoke", "--retry-failed"], "--retry-failed belongs to"),
        (["diagnose", "--smoke", "--seeds", "0", "1"], "give one seed"),
        (["table", "--smoke", "--seeds", "0", "0"], "every seed once"),
        (["table", "--smoke", "--rho", "[]"], "leaves nothing to try"),
        (["run", "--smoke", "--rho", "[0.1, 0.2]"], "which only rosu vision table tries"),
        (["diagnose", "--smoke", "--batch-sizes", "4"], "--batch-sizes belongs to rosu vision audit"),
        (["audit", "--smoke", "--seeds", "0", "1"], "give one seed"),
        (["run", "--smoke", "--forget-until", "holdout", "--protocol", "classwise"], "2.3 for ten classes"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["vision", *words]) != 0
    errors = capsys.readouterr().err
    assert message in errors and "Traceback" not in errors
    assert not list(tmp_path.rglob("*.json"))  # nothing was trained or measured


def test_the_papers_figures_stand_beside_ours_in_files_and_below_on_a_terminal() -> None:
    figures = {name: {"mean": 50.0, "std": 1.0, "count": 3} for name in ("RA", "FA", "TA", "delta", "MIA", "minutes")}
    paper = paper_figures("tables", "cifar10", "random")
    rows = [
        {"name": name, "label": name, "figures": figures, "paper": paper.get(name), "errors": []}
        for name in ("before", "retrain", "rosu")
    ]
    setup = {"images": [9, 9, 10], "seeds": [0], "protocol": "random", "model": "resnet18", "width": 64}
    setup |= {"pretrain_epochs": 200, "validation_share": 0.05}
    section = vision_section({"schema": "", "setup": setup, "rows": rows}, "methods", "table_random")
    whole, ours, theirs = section.tables
    assert whole.folded and not ours.folded and len(whole.columns) == 12 and len(ours.columns) == 6
    assert whole.rows[2].cells[9].value == theirs.rows[2].cells[3].value == 0.26
    assert theirs.columns == ours.columns and ours.rows[2].cells[0].value == 50.0


def test_a_vision_recipe_given_to_another_verb_is_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", str(ROOT / "configs/vision/cifar10.yaml")]) != 0
    assert "which have a verb of their own: rosu vision" in capsys.readouterr().err


def test_nothing_outside_imports_vision_at_the_top() -> None:
    """Language users pay nothing: only the verb and its page do, and they are imported when the verb is called."""
    allowed = {"cli/vision.py", "presentation/vision.py"}
    for path in (ROOT / "rosu_llm").rglob("*.py"):
        name = str(path.relative_to(ROOT / "rosu_llm"))
        if name.startswith("vision/") or name in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert "vision" not in (node.module or "").split("."), name
                assert not {"torchvision", "timm", "PIL"} & {(node.module or "").split(".")[0]}, name
