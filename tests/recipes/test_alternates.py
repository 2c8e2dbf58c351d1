"""Alternates that a model generates, and recipes that read alternates and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.cli.main import main
from rosu_llm.data.third_answers import drawn_refusals, read_refusals
from rosu_llm.errors import ConfigError, DataError
from rosu_llm.recipes.alternates import AlternatesPlan, usable, write_alternates
from rosu_llm.recipes.prepare import load, prepare
from rosu_llm.recipes.settings import build
from tests.training.tiny_world import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def plan(world: World, **changes: Any) -> AlternatesPlan:
    return AlternatesPlan(
        **{"model": world.model, "data": f"{world.data}:forget10", "count": 3, "max_new_tokens": 4, **changes}
    )


class Killed(BaseException):
    pass


def test_the_same_seed_gives_the_same_file_also_after_a_kill(world: World, tmp_path: Path) -> None:
    whole, resumed, other = (tmp_path / name for name in ("whole.jsonl", "resumed.jsonl", "other.jsonl"))
    assert write_alternates(plan(world), whole) == 5

    def kill(done: int, total: int) -> None:
        assert total == 5
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        write_alternates(plan(world), resumed, kill)
    partial = resumed.with_name("resumed.jsonl.partial")
    assert not resumed.exists()
    with partial.open("ab") as file:
        file.write(b'{"question": "cut sh')
    seen: list[int] = []
    write_alternates(plan(world), resumed, lambda done, total: seen.append(done))
    assert seen == [3, 4, 5]  # what was there is not generated again
    assert resumed.read_bytes() == whole.read_bytes()
    assert not partial.exists()
    write_alternates(plan(world, seed=1), other)
    assert other.read_bytes() != whole.read_bytes()
    for line in whole.read_text().splitlines():
        row = json.loads(line)
        assert len(set(row["alternates"])) == 3
        assert row["answer"] not in row["alternates"]


def test_a_partial_file_of_other_settings_is_not_continued(world: World, tmp_path: Path) -> None:
    def kill(done: int, total: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        write_alternates(plan(world), tmp_path / "a.jsonl", kill)
    with pytest.raises(ConfigError, match=r"generated otherwise \(seed was 0, now 4\)"):
        write_alternates(plan(world, seed=4), tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"), [({"temperature": 0.0}, "--temperature 0 gives the same"), ({"count": 0}, "--count 0 must")]
)
def test_nonsense_is_refused_before_anything_is_loaded(
    world: World, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_alternates(plan(world, model="nowhere", **changes), tmp_path / "a.jsonl")


def test_only_other_texts_are_usable() -> None:
    assert usable(["a  b", "a b ", "", " c", "c", "d"], "a b") == ["c", "d"]


def test_the_command_writes_what_a_recipe_reads(world: World, tmp_path: Path) -> None:
    file = tmp_path / "alternates.jsonl"
    flags = ["--data", f"{world.data}:forget10", "--output", str(file), "--count", "2", "--max-new-tokens", "4"]
    assert main(["data", "alternates", world.model, *flags]) == 0
    values = recipe(world, tmp_path, forget_loss="altpo", alternates=str(file))
    trainer = prepare(build(values)).trainer
    trainer.train()
    assert all(len(own) == 2 for own in trainer.train_dataset.forget.alternates)
    assert trainer.state.log_history[0]["loss/forget"] == pytest.approx(-20 * 0.6931472, rel=1e-6)


def test_alternates_of_data_whose_fields_are_called_otherwise(world: World, tmp_path: Path) -> None:
    for name in ("forget10", "full"):
        rows = [json.loads(line) for line in (world.data / f"{name}.json").read_text().splitlines()]
        renamed = (json.dumps({"q": row["question"], "a": row["answer"]}) for row in rows)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(renamed))
    file, keys = tmp_path / "alternates.jsonl", {"question_key": "q", "answer_key": "a"}
    write_alternates(plan(world, data=str(tmp_path / "forget10.jsonl"), count=2, **keys), file)
    sources = {"forget_data": str(tmp_path / "forget10.jsonl"), "retain_data": str(tmp_path / "full.jsonl")}
    loaded = load(build(recipe(world, tmp_path, forget_loss="altpo", alternates=str(file), **sources, **keys)))
    assert [len(own) for own in loaded.forget.alternates] == [2] * 5


def recipe(world: World, out: Path, **changes: Any) -> dict[str, Any]:
    given = world.settings(out / "run", method="graddiff", forget_data=f"{world.data}:forget10", save_strategy="no")
    return {**given, "max_steps": 2, **changes}


@pytest.mark.parametrize("name", ["idk_nll", "idk_dpo"])
def test_refusals_come_with_the_package(world: World, tmp_path: Path, name: str) -> None:
    prepared = prepare(build(recipe(world, tmp_path, forget_loss=name)))
    own = prepared.loaded.forget.alternates
    assert [len(each) for each in own] == [5] * 5
    prepared.trainer.train()


def test_the_shipped_refusals_and_their_draw() -> None:
    shipped = read_refusals(None)
    assert len(shipped) == len(set(shipped)) >= 100
    drawn = drawn_refusals(["q", "r"], shipped, 3)
    assert drawn == drawn_refusals(["q", "r"], shipped, 3) != drawn_refusals(["q", "r"], shipped, 4)
    assert all(len({text for _, text in own}) == 5 for own in drawn)
    assert drawn_refusals(["q"], ["only"], 0) == [[("q", "only")]]


def test_a_third_answer_that_is_missing_or_the_answer_is_one_clear_error(world: World, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (world.data / "forget10.json").read_text().splitlines()]
    same, few, empty = (tmp_path / name for name in ("same.jsonl", "few.jsonl", "empty.txt"))
    same.write_text("\n".join(json.dumps({**row, "alternates": ["another", row["answer"]]}) for row in rows))
    few.write_text(json.dumps({**rows[0], "alternates": ["another"]}))
    empty.write_text("\n \n")
    for changes, message in (
        ({"forget_loss": "altpo"}, "there is none: generate some with 'rosu data alternates"),
        ({"forget_loss": "altpo", "alternates": str(same)}, "Forget row 1.*is the answer itself"),
        ({"forget_loss": "altpo", "alternates": str(few)}, "no row for the question of forget row 2"),
        ({"forget_loss": "idk_dpo", "refusals": "nowhere.txt"}, "refusals='nowhere.txt' is not a file"),
        ({"forget_loss": "idk_nll", "refusals": str(empty)}, "holds no line of text"),
    ):
        with pytest.raises(DataError, match=message):
            load(build(recipe(world, tmp_path, **changes)))
    for changes, message in (
        ({"refusals": str(empty)}, "would be ignored by forget_loss='nll'"),
        ({"forget_loss": "idk_dpo", "alternates": str(few)}, "would be ignored by forget_loss='idk_dpo'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(build(recipe(world, tmp_path, **changes)))
