"""A model is identified by its contents; folders that cannot be evaluated are refused before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from rosu_llm.errors import ConfigError
from rosu_llm.evaluation.model_identity import Model, find_model, identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in (
        ("config.json", "{}"),
        ("tokenizer.json", "{}"),
        ("model.safetensors", "weights-1"),
        ("README.md", "a card"),
    ):
        (folder / name).write_text(content)
    return folder


def key(folder: Path) -> str:
    return identity(find_model(str(folder)))


def test_same_size_and_time_but_other_weights_is_another_model(folder: Path) -> None:
    file = folder / "model.safetensors"
    before, times = key(folder), file.stat()
    file.write_text("weights-2")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_size == times.st_size and file.stat().st_mtime_ns == times.st_mtime_ns
    assert key(folder) != before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_configuration_and_tokenizer_take_part(folder: Path, name: str) -> None:
    before = key(folder)
    (folder / name).write_text('{"a": 1}')
    assert key(folder) != before


def test_place_and_card_do_not(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    (copy / "README.md").write_text("another card")
    assert key(copy) == key(folder)


def test_moving_bytes_between_files_changes_it(folder: Path) -> None:
    (folder / "a.json").write_text("12")
    (folder / "b.json").write_text("3")
    before = key(folder)
    (folder / "a.json").write_text("1")
    (folder / "b.json").write_text("23")
    assert key(folder) != before


def test_a_hub_model_is_its_commit() -> None:
    assert identity(Model("o/n", "o/n", "abc", local=False)) == "hub:o/n@abc"
    assert Model("o/n", "o/n", "abc", local=False).label == "n"


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", r"no \*.safetensors"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_incomplete_folders_are_refused(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=message):
        find_model(str(folder))


def test_missing_shards_and_adapters_are_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="lacks 1 of its shards, first model-00002"):
        find_model(str(folder))
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="adapter: merge it"):
        find_model(str(folder))


def test_absent_models_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        find_model(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="is a file"):
        find_model(__file__)
    with pytest.raises(ConfigError, match="neither a folder here nor a model that the hub gave"):
        find_model("nobody/no-such-model")
