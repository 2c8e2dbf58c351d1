"""The simulated accelerator refuses what CUDA refuses, computes what the CPU computes, and counts what happens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.accelerator.device import missing
from tests.accelerator.results import Results

pytestmark = pytest.mark.xdist_group("processes")

MIXED = "Expected all tensors to be on the same device"


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("sum of two devices", MIXED),
        ("product", MIXED),
        ("cat", MIXED),
        ("stack of a CPU scalar", MIXED),
        ("device index into a CPU tensor", "indices should be"),
        ("CPU generator", "device type for generator"),
        ("two accelerators", MIXED),
        ("numpy", "can't convert"),
        ("a module on the CPU", MIXED),
        ("more memory than there is", "OutOfMemoryError"),
    ],
)
def test_it_refuses_what_cuda_refuses(action: str, words: str, results: Results) -> None:
    assert words in results.found("npu/checks")["refused"][action]


def test_it_does_what_any_device_does(results: Results) -> None:
    """Among it: random numbers that a Hessian product draws again, also where the device is not called cuda."""
    done = results.found("npu/checks")["allowed"]
    assert len(done) == 6
    assert all(done.values()), done


@pytest.mark.parametrize(
    ("action", "events", "size"),
    [
        ("bool", 1, 1),
        ("item", 1, 4),
        ("cpu", 1, 24),
        ("mask", 1, 0),
        ("arithmetic", 0, 0),
        ("to the device", 1, 16),
        ("sum", 0, 0),
        ("product", 1, 24),
    ],
)
def test_it_counts_what_happens(action: str, events: int, size: int, results: Results) -> None:
    assert results.found("npu/checks")["counted"][action] == [events, size]


@pytest.mark.parametrize("action", ["double", "sum in double"])
def test_float64_is_counted_also_where_a_reduction_converts_its_input(action: str, results: Results) -> None:
    assert results.found("npu/checks")["counted"][action][1] >= 48  # six numbers


def test_without_a_compiler_its_tests_are_skipped_with_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert missing() == "no g++ and no ninja"
