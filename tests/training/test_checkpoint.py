"""Whatever a killed run leaves behind, what counts as a checkpoint is whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rosu_llm.errors import ConfigError
from rosu_llm.files import write_atomically
from rosu_llm.training import checkpoints as checkpoint
from rosu_llm.training.checkpoints import MARKER, last_complete, marked, remove_all, resolve_resume, rotate, staged

FILES = ("trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt")


def whole(folder: Path, name: str, files: tuple[str, ...] = FILES) -> Path:
    """A folder that looks like a finished checkpoint; ``x/`` is a folder in it."""
    path = folder / name
    path.mkdir()
    for file in files:
        if file.endswith("/"):
            (path / file).mkdir()
        else:
            fill(path / file)
    return path


def fill(path: Path) -> None:
    """A small file that is whole, as its name says."""
    if path.suffix == ".safetensors":
        save_file({"w": torch.zeros(2)}, path)
    elif path.suffix in (".pt", ".bin"):
        torch.save({}, path)
    else:
        path.write_text("{}")


# -- which checkpoint is the last ---------------------------------------------------------------------


def test_no_folder_and_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert last_complete(tmp_path / "missing") is None
    (tmp_path / "runs").mkdir()
    (tmp_path / "model.safetensors").touch()
    assert last_complete(tmp_path) is None


def test_steps_are_numbers_not_text(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        whole(tmp_path, f"checkpoint-{step}")
    assert last_complete(tmp_path) == tmp_path / "checkpoint-100"


def test_marked_and_half_written_ones_are_passed_over(tmp_path: Path) -> None:
    whole(tmp_path, "checkpoint-1")
    whole(tmp_path, "checkpoint-2")
    (whole(tmp_path, "checkpoint-3") / MARKER).touch()  # killed while writing
    (tmp_path / "checkpoint-4").mkdir()  # killed before the state was written
    (tmp_path / "checkpoint-5").touch()  # not a folder
    whole(tmp_path, "checkpoint-6x")
    whole(tmp_path, "checkpoint-best")
    assert last_complete(tmp_path) == tmp_path / "checkpoint-2"


@pytest.mark.parametrize("name", ["old-checkpoint-9", "tmp-checkpoint-9"])
def test_folders_that_only_end_like_a_checkpoint_are_not_one(tmp_path: Path, name: str) -> None:
    """Set aside by hand, or the staging folder of earlier versions of transformers."""
    whole(tmp_path, "checkpoint-2")
    whole(tmp_path, name)
    assert last_complete(tmp_path) == tmp_path / "checkpoint-2"


# -- what a checkpoint consists of ----------------------------------------------------------------------

KINDS: dict[str, tuple[str, ...]] = {
    "whole": ("model.safetensors", "optimizer.pt", "scheduler.pt"),
    "pickled": ("pytorch_model.bin", "optimizer.bin", "scheduler.pt"),
    "adapter": ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt"),
    "fsdp": ("pytorch_model_fsdp_0/", "optimizer_0/", "scheduler.pt"),
    "fsdp-full": ("pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.pt"),
    "deepspeed": ("global_step3/", "latest"),
    "representation": ("rosu_theta.safetensors", "optimizer.pt", "scheduler.pt"),
}


@pytest.mark.parametrize("files", KINDS.values(), ids=list(KINDS))
def test_every_layout_s_checkpoint_is_one_as_long_as_it_has_its_parts(tmp_path: Path, files: tuple[str, ...]) -> None:
    path = whole(tmp_path, "checkpoint-3", ("trainer_state.json", *files))
    assert last_complete(tmp_path) == last_complete(tmp_path, resumable=True) == path
    assert resolve_resume(str(path), "elsewhere") == str(path)
    part = path / files[0]
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    (path / "rosu_reference.safetensors").touch()  # not the model
    assert last_complete(tmp_path) is None
    with pytest.raises(ConfigError, match="holds no model"):
        resolve_resume(str(path), "elsewhere")


def test_a_model_in_shards_needs_all_of_them(tmp_path: Path) -> None:
    shards = ("model-1-of-2.safetensors", "model-2-of-2.safetensors")
    path = whole(tmp_path, "checkpoint-3", ("trainer_state.json", *shards, "optimizer.pt", "scheduler.pt"))
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert last_complete(tmp_path) == path
    (path / shards[1]).unlink()
    assert last_complete(tmp_path) is None


@pytest.mark.parametrize("missing", ["optimizer.pt", "scheduler.pt"])
def test_a_model_without_optimizer_is_a_checkpoint_but_none_to_resume_from(tmp_path: Path, missing: str) -> None:
    """A finished run's folder has a trainer_state.json too: resuming there would start a new optimizer, silently."""
    older = whole(tmp_path, "checkpoint-2")
    newer = whole(tmp_path, "checkpoint-3", tuple(file for file in FILES if file != missing))
    assert last_complete(tmp_path) == newer
    assert resolve_resume(True, str(tmp_path)) == str(older)
    with pytest.raises(ConfigError, match=r"holds no optimizer state.*finished run"):
        resolve_resume(str(newer), str(tmp_path))
    shutil.rmtree(older)
    with pytest.raises(ConfigError, match="holds no complete checkpoint with an optimizer's state"):
        resolve_resume(True, str(tmp_path))


@pytest.mark.parametrize("file", FILES)
def test_a_broken_checkpoint_is_passed_over_for_an_older_whole_one(tmp_path: Path, file: str) -> None:
    """A full disk, or a copy that was cut short."""
    older, newer = whole(tmp_path, "checkpoint-2"), whole(tmp_path, "checkpoint-3")
    content = (newer / file).read_bytes()
    (newer / file).write_bytes(content[: len(content) // 2])
    assert resolve_resume(True, str(tmp_path)) == resolve_resume("auto", str(tmp_path)) == str(older)
    with pytest.raises(ConfigError, match=f"holds a {file} that is broken or cut short"):
        resolve_resume(str(newer), str(tmp_path))


# -- the marker ---------------------------------------------------------------------------------------


def test_the_marker_is_there_from_the_first_byte_to_the_last(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoint-7"
    with marked(folder, writer=True):
        assert (folder / MARKER).exists()
        for name in FILES:
            fill(folder / name)
        assert last_complete(tmp_path / "run") is None
    assert not (folder / MARKER).exists()
    assert last_complete(tmp_path / "run") == folder


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_marker_stays_when_writing_fails(tmp_path: Path, error: type[BaseException]) -> None:
    folder = tmp_path / "checkpoint-7"
    with pytest.raises(error), marked(folder, writer=True):
        (folder / "trainer_state.json").write_text("{}")
        raise error
    assert (folder / MARKER).exists()
    assert last_complete(tmp_path) is None


def test_writing_again_over_a_broken_one_makes_it_whole(tmp_path: Path) -> None:
    (whole(tmp_path, "checkpoint-7") / MARKER).touch()
    with marked(tmp_path / "checkpoint-7", writer=True):
        pass
    assert last_complete(tmp_path) == tmp_path / "checkpoint-7"


def test_other_processes_neither_make_nor_remove_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-7"
    with marked(folder, writer=False):
        assert not folder.exists()
    (whole(tmp_path, "checkpoint-7") / MARKER).touch()
    with marked(folder, writer=False):
        pass
    assert (folder / MARKER).exists()


# -- what to resume from --------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, False, ""])
def test_nothing_asked_nothing_resumed(tmp_path: Path, value: Any) -> None:
    whole(tmp_path, "checkpoint-3")
    assert resolve_resume(value, str(tmp_path)) is None


def test_true_is_the_newest_whole_one(tmp_path: Path) -> None:
    whole(tmp_path, "checkpoint-3")
    (whole(tmp_path, "checkpoint-4") / MARKER).touch()
    assert resolve_resume(True, str(tmp_path)) == str(tmp_path / "checkpoint-3")


def test_a_path_is_itself(tmp_path: Path) -> None:
    path = whole(tmp_path, "anything")
    assert resolve_resume(str(path), "elsewhere") == str(path)


def test_true_without_a_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    (whole(tmp_path, "checkpoint-4") / MARKER).touch()
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        resolve_resume(True, str(tmp_path))


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        resolve_resume(str(tmp_path / "checkpoint-1"), str(tmp_path))


def test_a_path_that_was_not_finished_is_refused(tmp_path: Path) -> None:
    (whole(tmp_path, "checkpoint-4") / MARKER).touch()
    with pytest.raises(ConfigError, match="was not written to the end"):
        resolve_resume(str(tmp_path / "checkpoint-4"), str(tmp_path))


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    """The output folder instead of a checkpoint in it: an easy slip, and Trainer would end in a FileNotFoundError."""
    whole(tmp_path, "checkpoint-4")
    with pytest.raises(ConfigError, match="checkpoint"):
        resolve_resume(str(tmp_path), str(tmp_path))


# -- old ones go ----------------------------------------------------------------------------------------


def left(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.iterdir())


@pytest.mark.parametrize(
    ("limit", "kept"), [(None, [2, 4, 10]), (0, [2, 4, 10]), (1, [10]), (2, [4, 10]), (3, [2, 4, 10]), (9, [2, 4, 10])]
)
def test_the_oldest_go_until_the_limit_is_kept(tmp_path: Path, limit: int | None, kept: list[int]) -> None:
    for step in (2, 4, 10):
        whole(tmp_path, f"checkpoint-{step}")
    rotate(tmp_path / "checkpoint-10", limit)
    assert left(tmp_path) == kept


@pytest.mark.parametrize(("limit", "kept"), [(1, [2, 10]), (2, [2, 10]), (3, [2, 4, 10])])
def test_the_best_stays(tmp_path: Path, limit: int, kept: list[int]) -> None:
    for step in (2, 4, 10):
        whole(tmp_path, f"checkpoint-{step}")
    rotate(tmp_path / "checkpoint-10", limit, str(tmp_path / "checkpoint-2"))
    assert left(tmp_path) == kept


def test_the_newest_stays_although_others_count_further(tmp_path: Path) -> None:
    """A run resumed from an earlier checkpoint, or whose later one was not finished when it was killed."""
    for step in (2, 3, 4):
        whole(tmp_path, f"checkpoint-{step}")
    (tmp_path / "checkpoint-4" / MARKER).touch()
    rotate(tmp_path / "checkpoint-3", 2)
    assert left(tmp_path) == [2, 3]
    whole(tmp_path, "checkpoint-4")
    rotate(tmp_path / "checkpoint-3", 1)
    assert left(tmp_path) == [3]


@pytest.mark.parametrize("how", ["rotated", "all"])
def test_what_is_deleted_in_half_is_no_checkpoint(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    older = whole(tmp_path, "checkpoint-2")
    newest = whole(tmp_path, "checkpoint-4")

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        rotate(newest, 1) if how == "rotated" else remove_all(tmp_path)
    assert older.is_dir()
    with pytest.raises(ConfigError, match="is no checkpoint"):
        resolve_resume(str(older), str(tmp_path))
    assert last_complete(tmp_path) == newest


def test_one_that_may_not_be_deleted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder made read-only to protect it, say; training goes on."""
    older, newest = whole(tmp_path, "checkpoint-2"), whole(tmp_path, "checkpoint-4")

    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", forbidden)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
    rotate(newest, 1)
    assert older.is_dir()


# -- files that appear at once --------------------------------------------------------------------------


def content(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_staged_files_replace_the_old_and_spare_the_rest(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("old")
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "stale").write_text("old")
    with staged(tmp_path) as stage:
        (stage / "model").write_text("new")
        (stage / "extra").mkdir()
        (stage / "extra" / "fresh").write_text("new")
        assert content(tmp_path)["model"] == "old"
    assert content(tmp_path) == {"model": "new", "notes": "mine", "extra/fresh": "new"}


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_old_files_are_intact_when_writing_fails(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "model").write_text("old")
    with pytest.raises(error), staged(tmp_path) as stage:
        (stage / "model").write_text("ne")
        (stage / "other").write_text("x")
        raise error
    assert content(tmp_path) == {"model": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_leftovers_of_a_killed_run_do_not_get_in(tmp_path: Path) -> None:
    with staged(tmp_path) as stage:
        name = stage.name
    (tmp_path / name).mkdir()
    (tmp_path / name / "half").write_text("half")
    with staged(tmp_path) as stage:
        (stage / "model").write_text("new")
    assert content(tmp_path) == {"model": "new"}


def test_an_index_arrives_after_the_files_it_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    replace = os.replace

    def record(source: Any, target: Any) -> None:
        order.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(checkpoint.os, "replace", record)
    names = ["a.safetensors.index.json", "model-1.safetensors", "model-2.safetensors", "z.json"]
    with staged(tmp_path / "new" / "folder") as stage:
        for name in names:
            (stage / name).write_text(name)
    assert sorted(order) == names
    assert order[-1] == "a.safetensors.index.json"


def test_writing_atomically_makes_folders_and_leaves_no_scrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a" / "b" / "state.json"
    write_atomically(path, "ä1")
    write_atomically(path, "ä2")
    assert content(tmp_path) == {"a/b/state.json": "ä2"}

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "ä3")
    assert content(tmp_path) == {"a/b/state.json": "ä2"}


def test_two_processes_may_write_the_same_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one writes and renames between this one's writing and renaming."""
    path, replace, own = tmp_path / "state.json", os.replace, os.getpid()

    def slowly(source: Any, target: Any) -> None:
        if checkpoint.os.getpid() == own:
            monkeypatch.setattr(checkpoint.os, "getpid", lambda: own + 1)
            write_atomically(path, "theirs")
            assert path.read_text() == "theirs"
        replace(source, target)

    monkeypatch.setattr(checkpoint.os, "replace", slowly)
    write_atomically(path, "ours")
    assert content(tmp_path) == {"state.json": "ours"}
