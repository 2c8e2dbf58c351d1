"""Folders that cannot be loaded: one clear error each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rosu_llm.errors import ConfigError, DataError, RosuError
from rosu_llm.representation.files import INDEX, SINGLE, CheckpointFiles
from rosu_llm.representation.loading import load_truncated, resolve_folder, shortened
from tests.models import tiny_decoder
from tests.representation.running import pattern


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in one file and in many."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = tiny_decoder()
    model.save_pretrained(folder / "single")
    model.save_pretrained(folder / "sharded", max_shard_size="20KB")
    return folder


def load(folder: Path, **changes: Any) -> Any:
    return load_truncated(str(folder), **{"target_layer": 2, "trainable_parameters": pattern(), **changes})


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    changed = change(index)
    (folder / INDEX).write_text(json.dumps(index if changed is None else changed))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def only_bin(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    for path in [*shards(folder), folder / INDEX]:
        path.unlink()


def quantise(folder: Path) -> None:
    """All matrices in one of the eight-bit float types."""
    tensors = {name: t.to(torch.float8_e4m3fn) for path in shards(folder) for name, t in load_file(path).items()}
    for path in [*shards(folder), folder / INDEX]:
        path.unlink()
    save_file(tensors, folder / SINGLE)


def rename_tensors(folder: Path) -> None:
    tensors = {f"x.{n}".replace("mlp", "ffn"): t for path in shards(folder) for n, t in load_file(path).items()}
    for path in [*shards(folder), folder / INDEX]:
        path.unlink()
    save_file(tensors, folder / SINGLE)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (lambda f: shards(f)[1].unlink(), r"lacks model-00002-of-.*Download the model again"),
    "truncated shard": (lambda f: cut(shards(f)[1], -100), r"is cut short\. Download it again"),
    "truncated in its header": (lambda f: cut(shards(f)[1], 40), r"not a whole safetensors file.*Download it again"),
    "empty shard": (lambda f: cut(shards(f)[1], 0), r"not a whole safetensors file.*Download it again"),
    "text instead": (lambda f: shards(f)[1].write_text("<html>not found</html>"), "not a whole safetensors file"),
    "header not JSON": (
        lambda f: shards(f)[1].write_bytes((4).to_bytes(8, "little") + b"abcd"),
        "not a whole safetensors file",
    ),
    "header no mapping": (
        lambda f: shards(f)[1].write_bytes((2).to_bytes(8, "little") + b"[]"),
        "not a whole safetensors file",
    ),
    "header of nonsense": (
        lambda f: shards(f)[1].write_bytes((7).to_bytes(8, "little") + b'{"a":1}'),
        "not a whole safetensors file",
    ),
    "trailing bytes": (lambda f: shards(f)[1].write_bytes(shards(f)[1].read_bytes() + b"x"), "Download it again"),
    "index not JSON": (lambda f: (f / INDEX).write_text("{"), "is not an index of safetensors files"),
    "index without a map": (lambda f: (f / INDEX).write_text("{}"), "is not an index of safetensors files"),
    "index outside": (
        lambda f: edit_index(f, lambda i: i["weight_map"].update({"lm_head.weight": "../single/model.safetensors"})),
        "names files outside its folder: ../single/model.safetensors",
    ),
    "index absolute": (
        lambda f: edit_index(f, lambda i: i["weight_map"].update({"lm_head.weight": "/etc/passwd"})),
        "names files outside its folder: /etc/passwd",
    ),
    "a shard the index forgot": (
        lambda f: edit_index(
            f,
            lambda i: {"weight_map": {k: v for k, v in i["weight_map"].items() if v != shards(f)[0].name}},
        ),
        r"does not hold the tensors that LlamaModel needs: .*incomplete",
    ),
    "pickles only": (only_bin, "Only safetensors are read: save the model with save_pretrained"),
    "no weights": (lambda f: [p.unlink() for p in [*shards(f), f / INDEX]], "holds neither model.safetensors nor"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "has no usable config.json"),
    "configuration not JSON": (lambda f: (f / "config.json").write_text("{"), "has no usable config.json"),
    "quantised": (quantise, "Weights stored as F8_E4M3 cannot be trained: use the unquantised checkpoint"),
    "other names": (rename_tensors, r"stored under other names: use path: plain"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_checkpoint_is_refused(
    damage: Callable[[Path], Any], message: str, checkpoints: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints / "sharded", folder)
    damage(folder)
    with pytest.raises(RosuError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer": 4}, "target_layer=4 is not a layer of this model, which has 4: give 0 to 3"),
        ({"target_layer": 1}, "layer 2, above target_layer=1"),
        ({"trainable_parameters": "w_down"}, "matches no parameter. The nearest are model.layers"),
        ({"trainable_parameters": "("}, "is not a regular expression"),
        ({"trainable_parameters": "embed"}, "model.embed_tokens.weight, outside the decoder layers"),
        ({"layer_stack_name": "blocks"}, "layer_stack='blocks' fits none"),
    ],
)
@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_wrong_settings_are_refused(kind: str, changes: dict[str, Any], message: str, checkpoints: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(checkpoints / kind, **changes)


def test_a_name_that_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a model that could be fetched from the hub") as caught:
        resolve_folder("nobody/nothing")
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="is not a folder"):
        CheckpointFiles(tmp_path / "nothing")


def test_a_hub_id_is_fetched_without_pickles(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(checkpoints / "single")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    part = load_truncated("somebody/model", target_layer=2, trainable_parameters=pattern())
    assert asked[0][0] == "somebody/model"
    assert not any("bin" in allowed or allowed == "*" for allowed in asked[0][1])
    assert part.files.folder == checkpoints / "single"


def test_a_single_file_wins_over_an_index_beside_it(checkpoints: Path, tmp_path: Path) -> None:
    """As in transformers; a stale index must not decide what is trained, nor travel with the copy."""
    shutil.copytree(checkpoints / "single", tmp_path / "m")
    shutil.copy(checkpoints / "sharded" / INDEX, tmp_path / "m" / INDEX)
    files = CheckpointFiles(tmp_path / "m")
    assert files.shards == [SINGLE]
    assert INDEX not in files.companions


def test_only_the_lower_layers_are_read(checkpoints: Path, tmp_path: Path) -> None:
    """Overwrite everything above layer 1 with ones: nothing of it arrives."""
    folder = tmp_path / "m"
    shutil.copytree(checkpoints / "single", folder)
    tensors = load_file(folder / SINGLE)
    for name in tensors:
        if ".layers.2." in name or ".layers.3." in name or "lm_head" in name:
            tensors[name] = torch.full_like(tensors[name], float("nan"))
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    part = load(folder, target_layer=1, trainable_parameters=r"layers\.1\.mlp\.down_proj")
    assert all(bool(torch.isfinite(t).all()) for t in part.model.state_dict().values())


def test_a_stored_tensor_the_model_does_not_have_cannot_be_trained(checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(checkpoints / "single", folder)
    extra = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**load_file(folder / SINGLE), **extra}, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"rotary_emb\.inv_freq"):
        load(folder, trainable_parameters=r"layers\.1\.self_attn")
    load(folder)


def test_lists_with_one_entry_per_layer_are_cut() -> None:
    config = tiny_decoder("gemma3").config
    short = shortened(config, 3)
    assert short.num_hidden_layers == 3
    assert short.layer_types == config.layer_types[:3]
    assert len(set(config.layer_types)) == 2
    assert config.num_hidden_layers == 4
