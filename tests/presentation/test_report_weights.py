"""Weight change against closed forms and dense products."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rosu_llm.errors import DataError
from rosu_llm.presentation.blocks import Figure, Missing
from rosu_llm.presentation.report.reading import ReportedRun
from rosu_llm.presentation.report.weights import find_base, weight_change, weights

Q0, Q1, NORM = (f"model.layers.{part}.weight" for part in ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.norm"))
EMBED = "model.embed_tokens.weight"


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        Q0: torch.randn(6, 4, generator=generator),
        Q1: torch.randn(6, 4, generator=generator),
        NORM: torch.ones(4),
        EMBED: torch.randn(9, 4, generator=generator),
    }


def save(folder: Path, content: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(content, folder / "model.safetensors")
    return folder


def test_a_scaled_matrix_moved_by_its_scale(tmp_path: Path) -> None:
    before = tensors()
    after = {**before, Q0: before[Q0] * 1.25, NORM: torch.tensor([2.0, 1.0, 1.0, 1.0])}
    change = weight_change(save(tmp_path / "base", before), save(tmp_path / "run", after))
    assert change.parts[0, "q"] == pytest.approx(0.25, rel=1e-6)
    assert change.parts[1, "q"] == 0.0
    assert change.parts[1, "norm"] == pytest.approx(0.5)  # ‖(1,0,0,0)‖/‖(1,1,1,1)‖
    assert change.parts[None, "embedding"] == 0.0
    moved = (0.25**2 * before[Q0].square().sum() + 1) / sum(t.square().sum() for t in before.values())
    assert change.total == pytest.approx(math.sqrt(moved), rel=1e-6)
    assert change.notes == ()


def test_shards_and_types_do_not_matter(tmp_path: Path) -> None:
    before = tensors()
    base = tmp_path / "base"
    base.mkdir()
    save_file({Q1: before[Q1], EMBED: before[EMBED]}, base / "a.safetensors")
    save_file({Q0: before[Q0], NORM: before[NORM]}, base / "b.safetensors")
    where = {Q1: "a", EMBED: "a", Q0: "b", NORM: "b"}
    index = {"weight_map": {name: f"{shard}.safetensors" for name, shard in where.items()}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    after = {name: (tensor * 1.5).double() for name, tensor in before.items()}
    change = weight_change(base, save(tmp_path / "run", after))
    assert all(value == pytest.approx(0.5, rel=1e-6) for value in change.parts.values())


def test_tensors_without_partner_are_named(tmp_path: Path) -> None:
    before = tensors()
    after = {Q0: before[Q0], EMBED: torch.ones(3, 4), "lm_head.weight": torch.ones(2)}
    change = weight_change(save(tmp_path / "base", before), save(tmp_path / "run", after))
    assert set(change.parts) == {(0, "q")}
    assert "4 tensors are not in both" in change.notes[0]


@pytest.mark.parametrize("rslora", [False, True])
def test_a_lora_adapter_is_measured_as_its_dense_product(tmp_path: Path, rslora: bool) -> None:
    before = tensors()
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 4, generator=generator), torch.randn(6, 2, generator=generator)
    adapter = tmp_path / "run"
    adapter.mkdir()
    stem = f"base_model.model.{Q1.removesuffix('.weight')}"
    save_file({f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 8, "use_rslora": rslora}))
    change = weight_change(save(tmp_path / "base", before), adapter)
    scale = 8 / (math.sqrt(2) if rslora else 2)
    dense = scale * (b.double() @ a.double())
    assert change.parts[1, "q"] == pytest.approx(float(dense.norm() / before[Q1].double().norm()), rel=1e-6)
    assert change.parts[0, "q"] == 0.0


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    base = save(tmp_path / "base", tensors())
    with pytest.raises(DataError, match="run's own folder"):
        weight_change(base, base)
    with pytest.raises(DataError, match="no tensor in common"):
        weight_change(base, save(tmp_path / "other", {"x": torch.ones(2)}))
    adapter = save(tmp_path / "dora", tensors())
    (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 8, "use_dora": True}))
    with pytest.raises(DataError, match="use_dora"):
        weight_change(base, adapter)


def test_the_base_is_local_or_unknown(tmp_path: Path) -> None:
    assert find_base(str(tmp_path)) == tmp_path
    assert find_base(None) is None
    assert find_base("nobody/no-such-model") is None
    assert find_base("no/such/folder at all") is None


def test_the_section_draws_or_says_why_not(tmp_path: Path) -> None:
    base, moved = save(tmp_path / "base", tensors()), save(tmp_path / "run", {n: t + 1 for n, t in tensors().items()})
    cut = save(tmp_path / "cut", tensors())
    content = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(content[:-7])
    empty = tmp_path / "empty"
    empty.mkdir()
    given = (("a", moved, str(base)), ("b", moved, "hub/model"), ("c", moved, None), ("d", empty, None))
    given += (("e", cut, str(base)),)
    runs = [ReportedRun(label=label, folder=folder, kind="rosu train", base=start) for label, folder, start in given]
    section = weights(runs, None)
    assert [block.key for block in section.blocks if isinstance(block, Figure)] == ["weights_0"]
    said = "\n".join(block.text for block in section.blocks if isinstance(block, Missing))
    assert "b: the model it started from is hub/model, which is not on this machine. Pass --base" in said
    assert "c: the model it started from is not recorded" in said
    assert "d holds no weights" in said
    assert "e: its weights cannot be compared" in said and "cut short" in said
    assert len([b for b in weights(runs, base).blocks if isinstance(b, Figure)]) == 3
