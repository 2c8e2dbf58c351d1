"""Two processes with a simulated device each: the weights of one, and an end with an error when one of them fails."""

from __future__ import annotations

import pytest
import torch

from tests.accelerator.cases import FAULTS, LAYOUTS, SPREAD
from tests.accelerator.results import Results, layouts
from tests.accelerator.table import rows
from tests.conftest import ROOT

pytestmark = pytest.mark.xdist_group("processes")

#: Own waits in a step: those of one device, the mean over ranks of each part's units, the length of the window, what
#: became of δ on its own.
WAITS = 10
#: All waits, for those that we ask DeepSpeed for: where every tensor of a sharded model lies, twice a step.
ALL = {"zero3": 80}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("zero"):
        pytest.importorskip("deepspeed")
    return str(request.param)


@pytest.mark.parametrize("name", SPREAD)
def test_weights_are_those_of_one_cpu_process(layout: str, name: str, results: Results) -> None:
    found = results.found(f"{layout}/{name}")
    assert found["layout"] == ("zero" if layout.startswith("zero") else layout)
    assert found["devices"] == ["npu"]
    # as on one device; gradients are summed over ranks in another order besides
    assert results.difference(f"{layout}/{name}", f"cpu/two: {name}") < 2e-4


def test_processes_share_what_is_measured_besides_the_window(layout: str, results: Results) -> None:
    """References of 8 batches; then in each of 3 steps 3 held-out batches, the forget window again, three passes.

    Two more find out about the output layer and the feed-forward blocks.
    """
    assert results.found("cpu/two: calibrated npo")["forwards"] == 2 + 8 + 3 * (3 + 2 + 3 * 2)
    # 3 batches do not divide by 2: both take part in 2 forward passes, for those may be collectives
    assert results.found(f"{layout}/calibrated npo")["forwards"] == 2 + 4 + 3 * (2 + 1 + 3 * 1)


def test_the_host_seldom_waits(layout: str, results: Results) -> None:
    found = results.found(f"{layout}/plain")
    own = [row for row in found["sites"]["sync"] if not row[2].startswith("[")]
    assert found["step"]["sync"]["own"] <= WAITS, own
    assert found["step"]["sync"]["count"] <= ALL.get(layout, 30), found["sites"]["sync"]


def test_a_slow_rank_changes_nothing(layout: str, results: Results) -> None:
    """It is a second late at the perturbed pass; to the bit."""
    assert torch.equal(results.weights(f"{layout}/slow"), results.weights(f"{layout}/plain"))


@pytest.mark.parametrize("name", FAULTS)
def test_when_one_rank_fails_both_end_with_one_error(layout: str, name: str, results: Results) -> None:
    """Nothing watches over them: the other notices at its next collective."""
    ended = results.ended[f"{layout}/{name}"]
    killed = FAULTS[name]["fault"] == "kill"
    assert ended["codes"] == [1, -9 if killed else 1]
    assert ended["seconds"] < 30.0
    assert results.said(f"{layout}/{name}", 0).count("Traceback") == 1
    if not killed:
        failed = results.said(f"{layout}/{name}", 1)
        assert failed.count("Traceback") == 1
        assert "OutOfMemoryError: simulated device out of memory" in failed.splitlines()[-1]


def test_the_documented_table_has_the_rows_of_these_runs(results: Results) -> None:
    """Differences depend on the machine, the rest does not."""
    if set(layouts()) != set(LAYOUTS):
        pytest.skip("the table is of all layouts")
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    documented = [line.split("|") for line in page.splitlines() if line.startswith(("| one device", "| two devices"))]
    mine = [line.split("|") for line in rows(results)]
    assert [[*row[:3], *row[4:]] for row in documented] == [[*row[:3], *row[4:]] for row in mine]
