"""One launch of two processes trains every case of every layout, and one process the cases they are compared with."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from tests.distributed.cases import alone, spread
from tests.distributed.processes import Run, train

Runs = Callable[[str], dict[str, Run]]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All cases of a layout (``local``: of one process), run when first asked for."""
    known: dict[str, dict[str, Run]] = {}

    def get(layout: str) -> dict[str, Run]:
        if layout.startswith("zero"):
            pytest.importorskip("deepspeed")
        if not known:
            deepspeed = importlib.util.find_spec("deepspeed") is not None
            known.update(train({"local": alone()}, tmp_path_factory.mktemp("alone"), world=1))
            known.update(train(spread(deepspeed), tmp_path_factory.mktemp("spread")))
        return known[layout]

    return get
