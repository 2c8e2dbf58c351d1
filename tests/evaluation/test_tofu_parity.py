"""Our TOFU evaluation gives OpenUnlearning's numbers: every aggregate, every question, every generated text.

Its results were made by its own ``src/eval.py`` on the models of ``tofu_fixture`` (see README.md there). Where
``OPEN_UNLEARNING_DIR`` and ``OPEN_UNLEARNING_PYTHON`` name a checkout and its interpreter, it runs here, on our files.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.tofu_cases import CASES, FIXTURE, evaluate, leaves, read, theirs

#: What is promised. Seen: 1.2e-5 (a Min-K++ score of one question), 1.0e-7 among aggregates; OpenUnlearning's own
#: numbers move by 1.2e-5 and 9e-8 between its batch sizes 4 and 32.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Case and model → our TOFU_EVAL.json: once each on our own retain logs and on OpenUnlearning's."""
    folder = tmp_path_factory.mktemp("tofu")
    files = {}
    for case, model, retain in (
        ("chat", "retain", None),
        ("chat", "full", folder / "chat_retain" / "TOFU_EVAL.json"),
        ("tags", "full", theirs("tags", "retain")),
    ):
        out = folder / f"{case}_{model}"
        evaluate(case, model, out, retain=retain)
        files[case, model] = out / "TOFU_EVAL.json"
    return files


@pytest.mark.parametrize(("case", "model"), [("chat", "retain"), ("chat", "full"), ("tags", "full")])
def test_every_number_and_text_is_openunlearnings(ours: Any, case: str, model: str) -> None:
    found, expected = dict(leaves(read(ours[case, model]))), dict(leaves(read(theirs(case, model))))
    assert found.keys() == expected.keys()
    numbers = {place: value for place, value in expected.items() if isinstance(value, float | int)}
    assert len(numbers) > 500
    small = {place: TOLERANCE * min(1, abs(value)) + 1e-6 for place, value in numbers.items()}  # of small numbers, too
    assert not {p: (found[p], value) for p, value in numbers.items() if not abs(found[p] - value) <= small[p]}
    others = expected.keys() - numbers.keys()
    assert {place: found[place] for place in others} == {place: expected[place] for place in others}


@pytest.mark.parametrize("case", CASES)
def test_the_summary_holds_what_openunlearning_would_print(ours: Any, case: str) -> None:
    found = read(ours[case, "full"].parent / "TOFU_SUMMARY.json")
    expected = read(theirs(case, "full").parent / "TOFU_SUMMARY.json")
    assert found.keys() >= expected.keys()
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_the_pinned_numbers_say_something(case: str) -> None:
    """A metric at 0 or 1 would agree with many wrong ones."""
    summary = read(theirs(case, "full").parent / "TOFU_SUMMARY.json")
    assert all(0.01 < value < 0.99 for name, value in summary.items() if name != "privleak")
    generations = [value for place, value in leaves(read(theirs(case, "full"))) if place.endswith("/generation")]
    assert len(set(generations)) > 20


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.skipif(
    "OPEN_UNLEARNING_DIR" not in os.environ or "OPEN_UNLEARNING_PYTHON" not in os.environ,
    reason="OPEN_UNLEARNING_DIR and OPEN_UNLEARNING_PYTHON name no checkout of OpenUnlearning and its interpreter",
)
def test_openunlearning_reads_our_retain_logs(ours: Any, tmp_path: Path) -> None:
    """Run for real, with our file as ``retain_logs_path``: forget quality and privleak come out the same."""
    logs = tmp_path / "logs"
    evaluate("tags", "retain", logs / "tags_retain")
    (logs / "chat_retain").symlink_to(ours["chat", "retain"].parent)
    variables = {
        "CHECKOUT": str(Path(os.environ["OPEN_UNLEARNING_DIR"]).resolve()),
        "PYTHON": os.environ["OPEN_UNLEARNING_PYTHON"],
        "RETAIN_LOGS": str(logs),
    }
    command = ["bash", str(FIXTURE / "openunlearning.sh"), str(tmp_path / "work")]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, timeout=600, check=False)
    records = "".join(file.read_text()[-3000:] for file in (tmp_path / "work").glob("*.log"))
    assert done.returncode == 0, done.stderr.decode() + records
    for case in CASES:
        found = dict(leaves(read(tmp_path / "work" / f"{case}_full" / "TOFU_EVAL.json")))
        expected = dict(leaves(read(theirs(case, "full"))))
        assert found["/forget_quality/agg_value"] == pytest.approx(expected["/forget_quality/agg_value"], abs=TOLERANCE)
        assert found["/privleak/agg_value"] == pytest.approx(expected["/privleak/agg_value"], abs=TOLERANCE)
        numbers = {place: value for place, value in found.items() if isinstance(value, float | int)}
        assert {place: expected[place] for place in numbers} == pytest.approx(numbers, rel=0, abs=TOLERANCE)
