"""A run goes on only as the run it was: with the method, data and model it was started with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rosu_llm.cli.main import main
from rosu_llm.errors import ConfigError
from rosu_llm.recipes.record import check_same_run, same_source, settings_to_keep
from rosu_llm.recipes.settings import build
from rosu_llm.training.checkpoints import MARKER, STATE_FILE, rotate
from tests.training.tiny_world import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def base(world: World, out: Path, **changes: Any) -> dict[str, Any]:
    return world.settings(out, **{"method": "rosu", "forget_data": f"{world.data}:forget10", **changes})


@pytest.fixture(scope="module")
def begun(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, with a checkpoint after each."""
    out = tmp_path_factory.mktemp("run") / "out"
    settings = {"method": "rosu", "forget_data": f"{world.data}:forget10", "max_steps": 2, "save_steps": 1}
    assert main(["train", *world.flags(out, **settings)]) == 0
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "graddiff"},
        {"forget_loss": "npo"},
        {"jacobian": "none"},
        {"rho": 0.1},
        {"learning_rate": 3e-3},
        {"weight_decay": 0.5},
        {"seed": 1},
        {"retain_data": "{data}:forget10"},
        {"lora_r": 2},
        {"per_device_train_batch_size": 1},
        {"limit": 3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_run_is_refused_with_what_differs(
    changes: dict[str, Any], world: World, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path for path in begun.rglob("*"))
    given = {key: value.format(data=world.data) if isinstance(value, str) else value for key, value in changes.items()}
    settings = {"method": "rosu", "forget_data": f"{world.data}:forget10", "save_steps": 1, **given}
    assert main(["train", *world.flags(begun, resume_from_checkpoint="true", **settings)]) == 2
    error = capsys.readouterr().err
    name = "samples_per_step" if "per_device_train_batch_size" in changes else next(iter(changes))
    assert f"{name} was" in error and "resume with the settings it was started with" in error
    assert error.count("\n") == 1
    assert sorted(path for path in begun.rglob("*")) == before


def test_what_the_budget_is_measured_on_is_part_of_the_run(world: World, tmp_path: Path) -> None:
    path, found = tmp_path / "budget.jsonl", []
    for rows in ("one", "two"):
        path.write_text(rows)
        found.append(settings_to_keep(*build(base(world, tmp_path, budget=0.1, budget_data=str(path))))["contents"])
    assert found[0].pop("budget_data") != found[1].pop("budget_data")
    assert found[0] == found[1]


def test_what_does_not_change_the_run_may_change(world: World, begun: Path, tmp_path: Path) -> None:
    """Longer, elsewhere, and the same samples per step in other portions."""
    checkpoint = str(begun / "checkpoint-1")
    check_same_run(checkpoint, *build(base(world, tmp_path, max_steps=9, attn_implementation="eager")))
    portions = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    check_same_run(checkpoint, *build(base(world, tmp_path, **portions)))
    with pytest.raises(ConfigError, match="samples_per_step was 2, now 4"):
        check_same_run(checkpoint, *build(base(world, tmp_path, gradient_accumulation_steps=2)))


def test_a_model_or_data_folder_may_have_moved(world: World, begun: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The same place written differently, or gone and now elsewhere under its name; a copy beside it is another."""
    checkpoint = str(begun / "checkpoint-1")
    monkeypatch.chdir(world.data.parent)
    check_same_run(checkpoint, *build(base(world, tmp_path, model_name_or_path="model", retain_data="tofu:full")))
    copy = tmp_path / "copy" / "tofu"
    shutil.copytree(world.data, copy)
    moved = base(world, tmp_path, retain_data=f"{copy}:full", forget_data=f"{copy}:forget10")
    with pytest.raises(ConfigError, match="forget_data was"):
        check_same_run(checkpoint, *build(moved))
    hidden = world.data.rename(world.data.with_name("away"))
    try:
        check_same_run(checkpoint, *build(moved))
    finally:
        hidden.rename(world.data)


def test_a_checkpoint_that_says_nothing_is_taken_as_it_is(world: World, begun: Path, tmp_path: Path) -> None:
    """Those of earlier versions, and of a trainer used from Python."""
    old = tmp_path / "checkpoint-1"
    shutil.copytree(begun / "checkpoint-1", old)
    (old / STATE_FILE).write_text("{}")
    check_same_run(str(old), *build(base(world, tmp_path, rho=0.1)))
    (old / STATE_FILE).unlink()
    check_same_run(str(old), *build(base(world, tmp_path, rho=0.1)))


def test_what_is_kept_is_what_json_gives_back(world: World, begun: Path) -> None:
    kept = settings_to_keep(*build(base(world, begun, max_steps=2, save_steps=1)))
    assert json.loads((begun / "checkpoint-2" / STATE_FILE).read_text())["settings"] == kept
    assert kept["samples_per_step"] == 2 and "output_dir" not in kept and "lora_alpha" not in kept


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        ("meta/Llama-1B", "meta/Llama-1B", True),
        ("meta/Llama-1B", "other/Llama-1B", False),
        ("owner/TOFU:forget10", "other/TOFU:forget10", False),
        ("/gone/away/model", "{model}", True),
        ("../gone/tofu:full", "{data}:full", True),
        ("../gone/tofu:full", "{data}:forget10", False),
        ("/gone/away/model", "owner/model", False),
    ],
)
def test_which_places_are_the_same(before: str, now: str, same: bool, world: World) -> None:
    """Two ids of the hub that end alike are two models."""
    assert same_source(before, now.format(model=world.model, data=world.data)) is same


def test_old_checkpoints_go_when_the_new_one_is_whole(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer deletes them before; killed in between it would leave none. Its arguments are kept as they were given."""
    seen: list[list[str]] = []

    def spied(newest: Path, *rest: Any) -> None:
        assert not (newest / MARKER).exists()
        seen.append(sorted(path.name for path in tmp_path.glob("checkpoint-*")))
        rotate(newest, *rest)

    monkeypatch.setattr("rosu_llm.training.checkpoints.rotate", spied)
    assert main(["train", *world.flags(tmp_path, save_steps=1, save_total_limit=2)]) == 0
    assert seen[2:] == [[f"checkpoint-{n}" for n in steps] for steps in ((1, 2, 3), (2, 3, 4))]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    for folder in (tmp_path, tmp_path / "checkpoint-4"):
        assert torch.load(folder / "training_args.bin", weights_only=False).save_total_limit == 2
