"""A copy of a checkpoint with some tensors replaced: everything else identical, nothing half written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from rosu_llm.errors import ConfigError, DataError
from rosu_llm.experiments.demo.world import word_tokenizer
from rosu_llm.representation import files as module
from rosu_llm.representation.files import INDEX, SINGLE, CheckpointFiles, read_header, refuse_held
from tests.conftest import ROOT
from tests.models import tiny_decoder
from tests.representation.running import parameter_names

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make(folder: Path, dtype: str = "float32", *, sharded: bool = False) -> Path:
    model = tiny_decoder(dtype=TYPES[dtype], pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if sharded else {}))
    word_tokenizer(["a", "b"]).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "notes.bin").write_bytes(b"not a companion")
    return folder


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.is_file()}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    result = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            result.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return result


def replacements(shift: float = 0.5) -> dict[str, torch.Tensor]:
    named = dict(tiny_decoder().named_parameters())
    return {name: named[name].detach() + shift for name in parameter_names()}


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", TYPES)
def test_only_the_named_tensors_differ(dtype: str, sharded: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, target = make(tmp_path / "source", dtype, sharded=sharded), tmp_path / "deep" / "target"
    before = digest(source)
    given = CheckpointFiles(source)
    assert (len(given.shards) > 3) == sharded
    given.check_destination(target)
    given.write_copy(target, replacements())
    assert digest(source) == before

    old, new = tensors(source), tensors(target)
    assert set(old) == set(new)
    for name, tensor in new.items():
        if name in replacements():
            assert tensor.dtype == TYPES[dtype]
            assert torch.equal(tensor, replacements()[name].to(TYPES[dtype]))
        else:
            assert torch.equal(tensor, old[name]) and tensor.dtype == old[name].dtype
    # byte for byte: outside the replaced ranges the files are the same
    for shard in given.shards:
        mine, its = (target / shard).read_bytes(), bytearray((source / shard).read_bytes())
        for name in replacements():
            if given.where[name] == shard:
                entry = read_header(source / shard)[name]
                its[entry.begin : entry.end] = mine[entry.begin : entry.end]
        assert mine == bytes(its)
    rest = {name for name in before if not name.endswith(".safetensors")} - {"notes.bin"}
    assert {p.name for p in target.iterdir()} == rest | set(given.shards)
    assert all((target / name).read_bytes() == (source / name).read_bytes() for name in rest)
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= rest

    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.generation_config.max_new_tokens == 17
    loaded = dict(model.named_parameters())
    for name, tensor in replacements().items():
        assert torch.equal(loaded[name].float(), tensor.to(TYPES[dtype]).float())
    assert AutoTokenizer.from_pretrained(target)("a b")["input_ids"] == [4, 5]


def test_a_snapshot_of_links_is_copied_as_files(tmp_path: Path) -> None:
    """The hub's cache holds links to read-only blobs."""
    source, snapshot = make(tmp_path / "blobs"), tmp_path / "snapshot"
    snapshot.mkdir()
    for path in source.iterdir():
        path.chmod(0o444)
        (snapshot / path.name).symlink_to(path)
    before = digest(source)
    CheckpointFiles(snapshot).write_copy(tmp_path / "target", replacements())
    assert digest(source) == before
    assert not any(p.is_symlink() for p in (tmp_path / "target").iterdir())
    assert torch.equal(tensors(tmp_path / "target")[parameter_names()[0]], replacements()[parameter_names()[0]])


def test_a_scalar_can_be_replaced(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"scale": torch.tensor(1.0), "other": torch.ones(3)}, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text("{}")
    CheckpointFiles(tmp_path).write_copy(tmp_path / "out", {"scale": torch.tensor(2.5)})
    written = tensors(tmp_path / "out")
    assert float(written["scale"]) == 2.5 and torch.equal(written["other"], torch.ones(3))


# -- refused in time --------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_model_is_refused(tmp_path: Path) -> None:
    refuse_held(tmp_path / "new", overwrite=False)
    (tmp_path / "checkpoint-2").mkdir()
    refuse_held(tmp_path, overwrite=False)
    for name in (SINGLE, "model-00001-of-00002.safetensors", "pytorch_model.bin", "adapter_model.safetensors"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).touch()
        with pytest.raises(ConfigError, match=rf"already holds a model \({name}\).*--overwrite true"):
            refuse_held(folder, overwrite=False)
        refuse_held(folder, overwrite=True)


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_overwriting_leaves_nothing_of_the_old_model(sharded: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source, target = make(tmp_path / "source", sharded=sharded), make(tmp_path / "target", sharded=not sharded)
    (target / "pytorch_model.bin").touch()
    CheckpointFiles(source).write_copy(target, replacements())
    weights = {p.name for p in target.iterdir() if "safetensors" in p.name or p.suffix == ".bin"} - {"notes.bin"}
    assert weights == set(CheckpointFiles(source).shards) | ({INDEX} if sharded else set())
    loaded = dict(AutoModelForCausalLM.from_pretrained(target).named_parameters())
    assert torch.equal(loaded[parameter_names()[0]], replacements()[parameter_names()[0]])


def test_the_original_is_refused_as_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = CheckpointFiles(make(tmp_path / "source"))
    (tmp_path / "link").symlink_to(tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    for target in (tmp_path / "source", tmp_path / "link", Path("source"), tmp_path / "x" / ".." / "source"):
        with pytest.raises(ConfigError, match="is the original model: give another folder"):
            given.check_destination(target)


def test_no_room_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = CheckpointFiles(make(tmp_path / "source"))
    total = sum(p.stat().st_size for p in (tmp_path / "source").iterdir() if p.name != "notes.bin")
    assert given.size == total
    usage = namedtuple("usage", "total used free")
    asked: list[Path] = []

    def disk(free: int) -> Any:
        return lambda path: asked.append(Path(path)) or usage(10 * total, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", disk(total - 1))
    with pytest.raises(ConfigError, match=r"GiB free; the model takes .*Free some space or give another folder"):
        given.check_destination(tmp_path / "a" / "b")
    assert asked == [tmp_path]  # the folder that exists
    monkeypatch.setattr(shutil, "disk_usage", disk(total))
    given.check_destination(tmp_path / "a" / "b")


def test_tensors_of_another_shape_are_refused(tmp_path: Path) -> None:
    given = CheckpointFiles(make(tmp_path / "source"))
    with pytest.raises(DataError, match=r"is stored as F32 \(32, 48\)"):
        given.write_copy(tmp_path / "target", {parameter_names()[0]: torch.zeros(48, 32)})
    assert not (tmp_path / "target").exists()


# -- interrupted ------------------------------------------------------------------------------------------


def assert_no_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert not (folder / "config.json").exists()
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(str(folder))


@pytest.mark.parametrize("when", ["copying", "overwriting", "renaming"])
def test_a_full_disk_leaves_no_model(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, target = CheckpointFiles(make(tmp_path / "source", sharded=True)), tmp_path / "target"
    before, count = digest(tmp_path / "source"), 0

    def full(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*args, **kwargs)

        return call

    where, name = {
        "copying": (module.shutil, "copyfile"),
        "overwriting": (module, "_overwrite"),
        "renaming": (module.os, "replace"),
    }[when]
    monkeypatch.setattr(where, name, full(getattr(where, name)))
    with pytest.raises(DataError, match=r"the disk is full\. No new model was left there.*newest checkpoint") as caught:
        given.write_copy(target, replacements())
    assert "\n" not in str(caught.value) and str(target) in str(caught.value)
    monkeypatch.undo()
    assert not (target / ".saving").exists()
    assert_no_model(target)
    assert digest(tmp_path / "source") == before
    given.write_copy(target, replacements())  # with room again it is written
    assert torch.equal(tensors(target)[parameter_names()[0]], replacements()[parameter_names()[0]])


def test_other_failures_are_named(tmp_path: Path) -> None:
    given = CheckpointFiles(make(tmp_path / "source"))
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"could not be written.*(File exists|Not a directory)"):
        given.write_copy(tmp_path / "file", replacements())


KILLED = """
import sys, os, signal, time, shutil
from pathlib import Path
import torch
from rosu_llm.representation import files
original = {where}.{name}
count = 0
def slow(*args, **kwargs):
    global count
    count += 1
    if count == 3:
        print("now", flush=True)
        time.sleep(60)
    return original(*args, **kwargs)
{where}.{name} = slow
given = files.CheckpointFiles(sys.argv[1])
name = "model.layers.1.mlp.down_proj.weight"
given.write_copy(Path(sys.argv[2]), {{name: torch.zeros(32, 48)}})
"""


@pytest.mark.parametrize(("where", "name"), [("files.shutil", "copyfile"), ("files.os", "replace")])
def test_a_killed_run_leaves_no_model(where: str, name: str, tmp_path: Path) -> None:
    source, target = make(tmp_path / "source", sharded=True), tmp_path / "target"
    script = KILLED.format(where=where, name=name)
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(source), str(target)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None and process.stdout.readline() == b"now\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    assert target.is_dir()
    assert_no_model(target)
    CheckpointFiles(source).write_copy(target, replacements())
    assert {p.name for p in target.iterdir()} == {p.name for p in source.iterdir()} - {"notes.bin"}


def test_headers_are_read_as_the_format_says(tmp_path: Path) -> None:
    """One written by hand: length, JSON, bytes."""
    header = json.dumps(
        {"__metadata__": {"a": "b"}, "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    ).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    (entry,) = read_header(path).values()
    assert (entry.dtype, entry.shape, entry.begin, entry.end) == ("F32", (2,), 8 + len(header), 16 + len(header))


def test_a_full_disk_while_overwriting_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, target = CheckpointFiles(make(tmp_path / "source")), make(tmp_path / "target")
    before = digest(target)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_overwrite", full)
    with pytest.raises(DataError, match="No new model was left there"):
        given.write_copy(target, replacements())
    assert digest(target) == before and not (target / ".saving").exists()


def test_a_failure_between_old_and_new_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some files of the one and some of the other would load, and be neither."""
    given, target = CheckpointFiles(make(tmp_path / "source", sharded=True)), make(tmp_path / "target", sharded=True)
    original, count = os.replace, 0

    def fail(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == 6:
            raise OSError(errno.EIO, "Input/output error")
        original(*args)

    monkeypatch.setattr(module.os, "replace", fail)
    with pytest.raises(DataError, match="Input/output error"):
        given.write_copy(target, replacements())
    monkeypatch.undo()
    assert_no_model(target)
