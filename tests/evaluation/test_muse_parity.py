"""Our MUSE evaluation gives OpenUnlearning's numbers: every aggregate, every sample, every generated text.

Its results were made by its own ``src/eval.py`` on the models of ``tofu_fixture`` and the data of ``muse_fixture`` (see
README.md there). Where ``OPEN_UNLEARNING_DIR`` and ``OPEN_UNLEARNING_PYTHON`` name a checkout and its interpreter, it
runs here.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rosu_llm.evaluation.muse.evaluate import MuseSettings, evaluate_muse
from tests.evaluation.tofu_cases import CASES, leaves, read
from tests.evaluation.tofu_cases import FIXTURE as MODELS

FIXTURE = Path(__file__).parent / "muse_fixture"
TOLERANCE = 1e-4  # as for TOFU; seen: 2e-5 (a Min-K++ score of one text), 1e-7 among aggregates


def theirs(case: str, model: str) -> Path:
    return FIXTURE / "openunlearning" / f"{case}_{model}" / "MUSE_EVAL.json"


def evaluate(case: str, model: str, out: Path, retain: Path | None, **settings: Any) -> dict[str, float]:
    form, tokenizer = CASES[case]
    llama = AutoModelForCausalLM.from_pretrained(MODELS / model, dtype=torch.float32)
    chosen = MuseSettings(data=str(FIXTURE / "muse"), chat_format=form, **{"batch_size": 16, **settings})
    return evaluate_muse(llama, AutoTokenizer.from_pretrained(MODELS / tokenizer), chosen, out, retain=retain)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Once on our own retain logs and once on OpenUnlearning's."""
    folder = tmp_path_factory.mktemp("muse")
    files = {}
    evaluate("chat", "retain", folder / "retain", None, metrics=("mia_min_k",))
    for case, retain in (("chat", folder / "retain"), ("tags", theirs("tags", "retain"))):
        evaluate(case, "full", folder / case, retain)
        files[case] = folder / case / "MUSE_EVAL.json"
    return files


@pytest.mark.parametrize("case", CASES)
def test_every_number_and_text_is_openunlearnings(ours: Any, case: str) -> None:
    found, expected = dict(leaves(read(ours[case]))), dict(leaves(read(theirs(case, "full"))))
    assert found.keys() == expected.keys()
    numbers = {place: value for place, value in expected.items() if isinstance(value, float | int)}
    assert len(numbers) > 200
    small = {place: TOLERANCE * min(1, abs(value)) + 1e-6 for place, value in numbers.items()}
    assert not {p: (found[p], value) for p, value in numbers.items() if not abs(found[p] - value) <= small[p]}
    others = expected.keys() - numbers.keys()
    assert {place: found[place] for place in others} == {place: expected[place] for place in others}


@pytest.mark.parametrize("case", CASES)
def test_the_summary_holds_what_openunlearning_would_print(ours: Any, case: str) -> None:
    found = read(ours[case].parent / "MUSE_SUMMARY.json")
    expected = read(theirs(case, "full").parent / "MUSE_SUMMARY.json")
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=0, abs=TOLERANCE)
    assert all(0.01 < value < 0.99 for name, value in expected.items() if name != "privleak")  # each says something


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.skipif(
    "OPEN_UNLEARNING_DIR" not in os.environ or "OPEN_UNLEARNING_PYTHON" not in os.environ,
    reason="OPEN_UNLEARNING_DIR and OPEN_UNLEARNING_PYTHON name no checkout of OpenUnlearning and its interpreter",
)
def test_openunlearning_still_gives_these_numbers(tmp_path: Path) -> None:
    variables = {
        "CHECKOUT": str(Path(os.environ["OPEN_UNLEARNING_DIR"]).resolve()),
        "PYTHON": os.environ["OPEN_UNLEARNING_PYTHON"],
    }
    command = ["bash", str(FIXTURE / "openunlearning.sh"), str(tmp_path / "work")]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, timeout=600, check=False)
    records = "".join(file.read_text()[-3000:] for file in (tmp_path / "work").glob("*.log"))
    assert done.returncode == 0, done.stderr.decode() + records
    for case in CASES:
        found = read(tmp_path / "work" / f"{case}_full" / "MUSE_SUMMARY.json")
        assert found == pytest.approx(read(theirs(case, "full").parent / "MUSE_SUMMARY.json"), abs=TOLERANCE)
