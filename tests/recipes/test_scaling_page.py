"""docs/scaling.md shows what its script computes, and what it says beside the tables is so."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.recipes.spreading import share
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
SCRIPT = ROOT / "scripts" / "scaling.py"


@pytest.fixture(scope="module")
def scaling() -> Any:
    pytest.importorskip("peft")
    found = importlib.util.spec_from_file_location("scaling", SCRIPT)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["scaling"] = module
    found.loader.exec_module(module)
    return module


def test_every_table_of_the_page_is_what_the_script_computes(scaling: Any) -> None:
    for title, table in scaling.tables().items():
        assert table in PAGE, title


def test_the_page_says_that_nothing_was_run_on_gpus() -> None:
    assert "nothing has been run on GPUs by us" in PAGE and PAGE.count("an estimate") >= 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "12.5 GiB"),
        ({"capture_dtype": "float32", "capture_device": "model"}, "26.3 GiB"),
        ({"optim": "adamw_torch_fused"}, "21.7 GiB"),
    ],
)
def test_what_fits_one_gpu_of_24_gb(changes: dict[str, str], said: str, scaling: Any, tmp_path: Path) -> None:
    step = scaling.shape_of("1B", "tofu_llama-3.2-1b_24gb", tmp_path, changes)
    assert f"{share(step, 'local', 1).device / 2**30:.1f} GiB" == said
    recipe = (scaling.RECIPES / "tofu_llama-3.2-1b_24gb.yaml").read_text(encoding="utf-8")
    assert said in (PAGE if changes else recipe)
    if not changes:
        assert share(step, "local", 1).host / 2**30 == pytest.approx(9.2, abs=0.05)


def test_an_8b_adapter_fits_one_gpu_of_40_gb(scaling: Any, tmp_path: Path) -> None:
    step = scaling.shape_of("8B", "tofu_llama-3.1-8b_lora", tmp_path)
    recipe = (scaling.RECIPES / "tofu_llama-3.1-8b_lora.yaml").read_text(encoding="utf-8")
    assert f"{share(step, 'local', 1).device / 2**30:.1f} GiB" in recipe
    assert step.memory.weights == 2 * (step.memory.total - step.memory.trainable) + 4 * step.memory.trainable


def test_time_adds_up(scaling: Any, tmp_path: Path) -> None:
    """8·P FLOPs for each of 3 × 2048 tokens; a tenth of the speed takes ten times as long."""
    step = scaling.shape_of("1B", "tofu_llama-3.2-1b", tmp_path, scaling.LARGE)
    fast, slow = scaling.Hardware(), scaling.Hardware(flops=98.9e12, between=5e9, memory=3.35e11)
    found = scaling.seconds(step, "zero3", 64, fast)
    assert found[0] == pytest.approx(3 * 2048 * 8 * 1_235_814_400 / (989e12 * 0.4))
    assert scaling.seconds(step, "zero3", 64, slow) == pytest.approx([10 * part for part in found])
