"""A diagnosis of a spread model gives the figures of one process, part by part, and leaves the weights alone."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rosu_llm import measure_coupling
from tests.conftest import ROOT
from tests.distributed.diagnosis_worker import PLAN, data
from tests.distributed.processes import environment
from tests.models import tiny_llama
from tests.preloaded import interpreter

pytestmark = pytest.mark.xdist_group("processes")

LAYOUTS = ("ddp", "fsdp2", "zero2", "zero3")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All layouts in one launch of two processes."""
    folder: Path = tmp_path_factory.mktemp("diagnosis")
    here = [x for x in LAYOUTS if not x.startswith("zero") or importlib.util.find_spec("deepspeed")]
    worker = ROOT / "tests" / "distributed" / "diagnosis_worker.py"
    command = [interpreter(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(worker)]
    done = subprocess.run(
        [*command, str(folder), *here], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return {layout: json.loads((folder / f"{layout}.json").read_text()) for layout in here}


@pytest.fixture(scope="module")
def truth() -> dict[str, Any]:
    return dict(measure_coupling(tiny_llama(), *data(), **PLAN).document)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_figures_are_those_of_one_process(layout: str, found: dict[str, dict[str, Any]], truth: dict[str, Any]) -> None:
    if layout not in found:
        pytest.skip("deepspeed is not installed")
    mine = found[layout]
    assert mine["world"] == 2 and mine["unchanged"]
    assert mine["setup"]["layout"] == ("zero" if layout.startswith("zero") else layout)
    assert mine["setup"]["processes"] == 2
    # float32 sums in another order; a second-order part is a difference of nearly equal losses
    for a, b in zip(mine["per_pair"], truth["per_pair"], strict=True):
        for key in ("cosine", "forget_norm", "retain_square", "q_norm", "forget_loss", "retain_loss"):
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6), key
        assert a["curvature_bound"] == pytest.approx(b["curvature_bound"], rel=1e-2)
    for grouping in ("by_part", "by_kind", "by_layer"):
        assert len(mine[grouping]) == len(truth[grouping])
        for a, b in zip(mine[grouping], truth[grouping], strict=True):
            assert (a["layer"], a["kind"], a["parameters"]) == (b["layer"], b["kind"], b["parameters"])
            for key in ("cosine", "contribution", "forget_share", "retain_share"):
                assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-6), (a["layer"], a["kind"], key)
    a, b = (document["full_batch"]["coupling"]["cosine"]["mean"] for document in (mine, truth))
    assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    for a, b in zip(mine["full_batch"]["curve"], truth["full_batch"]["curve"], strict=True):
        assert a["retain_batch_size"] == b["retain_batch_size"]
        for name in ("cosine", "retain_alignment"):
            assert a[name]["mean"] == pytest.approx(b[name]["mean"], rel=1e-4, abs=1e-6), name
    for a, b in zip(mine["at_rho"], truth["at_rho"], strict=True):
        for name in ("standard", "neutral"):
            for key in ("retain_change", "forget_gain"):
                assert a[name][key] == pytest.approx(b[name][key], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_three_copies_spread_over_the_processes(layout: str, found: dict[str, dict[str, Any]]) -> None:
    """One captured gradient, the backup of the weights, and with --full-batch the gradient of all retain samples: whole
    under DDP, else a half of each."""
    if layout not in found:
        pytest.skip("deepspeed is not installed")
    setup = found[layout]["setup"]
    copies = setup["held_bytes"] / (4 * setup["parameters"])
    assert copies == pytest.approx(3.0 if layout == "ddp" else 1.5, abs=0.03)
