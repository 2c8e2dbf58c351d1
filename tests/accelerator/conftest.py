"""All cases run once, when the first test asks for them."""

from __future__ import annotations

import pytest

from tests.accelerator.device import missing
from tests.accelerator.results import Results, produce


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    if reason := missing():
        pytest.skip(reason)
    return produce(tmp_path_factory.mktemp("accelerator"))
