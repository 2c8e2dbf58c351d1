"""Records are whole or absent, and a key names everything a cell depends on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.experiments import attempt as module
from rosu_llm.experiments.attempt import DONE, CellStore, Record, cell_key


def record_of(status: str, metrics: dict[str, float] | None = None, **more: Any) -> Record:
    return Record(status, metrics or {}, key="abc", label="ROSU", seed=3, **more)


def test_a_key_changes_with_everything_the_figures_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    task, settings = {"task": "demo", "people": 3}, {"rho": 0.4, "beta": "tied"}
    keys = [
        cell_key(task, settings, 0),
        cell_key(task, settings, 1),
        cell_key(task, {**settings, "rho": 0.40001}, 0),
        cell_key({**task, "people": 4}, settings, 0),
    ]
    monkeypatch.setattr(module, "__version__", "9.9.9")
    keys.append(cell_key(task, settings, 0))
    assert len(set(keys)) == 5


def test_a_key_does_not_depend_on_the_order_of_settings() -> None:
    assert cell_key({}, {"a": 1, "b": 2}, 0) == cell_key({}, {"b": 2, "a": 1}, 0)


def test_a_record_comes_back_as_it_was_and_nothing_else_is_left(tmp_path: Path) -> None:
    record = record_of(DONE, {"forget_em": 0.1}, seconds=1.5, settings={"rho": 0.4}, task={"task": "demo"})
    CellStore(tmp_path / "cells").put(record)
    assert CellStore(tmp_path / "cells").get("abc") == record
    assert [p.name for p in (tmp_path / "cells").iterdir()] == ["abc.json"]
    assert CellStore(tmp_path / "cells").get("abd") is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": "abc"}', "null", '{"unknown": 1}', "half"])
def test_a_file_that_is_no_record_counts_as_none(tmp_path: Path, damage: str) -> None:
    store = CellStore(tmp_path)
    store.put(record_of(DONE, {"forget_em": 0.1}))
    path = tmp_path / "abc.json"
    path.write_text(path.read_text()[:40] if damage == "half" else damage)
    assert store.get("abc") is None


def test_a_record_under_another_name_or_with_an_unknown_status_counts_as_none(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    store.put(record_of(DONE))
    (tmp_path / "abc.json").rename(tmp_path / "xyz.json")
    assert store.get("xyz") is None
    store.put(record_of("running"))
    assert store.get("abc") is None
    assert json.loads((tmp_path / "abc.json").read_text())["status"] == "running"
