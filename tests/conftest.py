"""Fixtures shared by all tests: no network, one thread, small models, where the real data is."""

from __future__ import annotations

import gc
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True, scope="session")
def _frozen_imports() -> None:
    """accelerate collects garbage at every start: not among all that was imported."""
    import peft  # noqa: F401
    from transformers import LlamaForCausalLM, Trainer  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_accelerate_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions remember the mixed precision of the last Trainer in the environment and in a singleton."""
    from accelerate.state import AcceleratorState

    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    AcceleratorState._reset_state()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with real data and small real models; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("ROSU_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("real data is not here: set ROSU_DATA to its folder")
    return folder
