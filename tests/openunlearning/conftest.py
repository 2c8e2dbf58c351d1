"""The stand-in checkout: its modules in this process, or its scripts in another."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace

import pytest

from tests.openunlearning.standin_run import CONFIGS, SOURCE

pytest.importorskip("hydra")

_THEIRS = ("trainer", "data", "evals", "model")


@pytest.fixture(autouse=True)
def _registry_as_before() -> Iterator[None]:
    """The losses that a test borrows from OpenUnlearning leave the registry with it."""
    from rosu_llm.losses import LOSSES

    import_module("rosu_llm.representation.losses")  # it stays imported, so what it registers must stay registered
    before = dict(LOSSES)
    yield
    LOSSES.clear()
    LOSSES.update(before)


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The stand-in's modules, importable under upstream's names while the test runs."""
    monkeypatch.syspath_prepend(str(SOURCE))
    yield SimpleNamespace(trainer=import_module("trainer"), data=import_module("data"), configs=CONFIGS)
    for name in [n for n in sys.modules if n.partition(".")[0] in _THEIRS]:
        del sys.modules[name]
