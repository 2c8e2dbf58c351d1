"""The model card: a header that hubs can read, and everything needed to repeat the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

import rosu_llm
from rosu_llm import MethodArguments
from rosu_llm.errors import DataError
from rosu_llm.training.model_card import BEGIN, END, Card, model_card, read_card, with_report

BASE: dict[str, Any] = {
    "name": "my-model",
    "base_model": 'meta/llama: "3" – ünïcode',
    "settings": {**MethodArguments().method_dict(), "learning_rate": 1e-5, "seed": 0},
    "versions": {"torch": "2.x", "transformers": "5.x"},
    "metrics": {"loss": 1.23456789, "step": 7, "loss/forget": float("nan")},
    "tags": ["tofu", "yes"],
}


def header(text: str) -> dict[str, Any]:
    start, block, _ = text.split("---\n", 2)
    assert start == ""
    result = yaml.safe_load(block)
    assert isinstance(result, dict)
    return result


def rows(text: str, section: str) -> dict[str, str]:
    """The two-column table under a heading."""
    body = text.split(f"## {section}\n")[1].split("\n## ")[0]
    cells = [line.strip("|").split("|") for line in body.splitlines() if line.startswith("| `")]
    assert all(len(row) == 2 for row in cells)
    return {key.strip(" `"): value.strip(" `") for key, value in cells}


def test_the_header_is_yaml_and_keeps_odd_characters() -> None:
    assert header(model_card(**BASE)) == {
        "library_name": "transformers",
        "tags": ["unlearning", "rosu-llm", "tofu", "yes"],
        "base_model": BASE["base_model"],
    }


def test_the_hubs_own_reader_agrees() -> None:
    data = ModelCard(model_card(**BASE)).data
    assert data.library_name == "transformers"
    assert data.tags == ["unlearning", "rosu-llm", "tofu", "yes"]
    assert data.base_model == BASE["base_model"]


def test_every_setting_version_and_value_is_there() -> None:
    text = model_card(**BASE)
    assert rows(text, "Settings") == {key: str(value) for key, value in BASE["settings"].items()}
    assert rows(text, "Last logged values") == {"loss": "1.23457", "step": "7", "loss/forget": "nan"}
    assert "- torch 2.x\n- transformers 5.x" in text
    assert rosu_llm.__version__ in text
    assert "\n# my-model\n" in text
    assert text.endswith("\n")


@pytest.mark.parametrize("base", [None, ""])
def test_without_base_model_none_is_claimed(base: str | None) -> None:
    text = model_card(**{**BASE, "base_model": base})
    assert "base_model" not in header(text)
    assert "starting from" not in text


def test_without_logs_there_is_no_empty_table() -> None:
    assert "Last logged values" not in model_card(**{**BASE, "metrics": {}})


@pytest.mark.parametrize(("calibrate", "said"), [("off", False), ("holdout", True), (2.5, True), (0.0, True)])
def test_calibration_is_declared(calibrate: Any, said: bool) -> None:
    text = model_card(**{**BASE, "settings": {"method": "rosu", "calibrate": calibrate}})
    assert ("calibrated" in text) is said


def test_the_card_says_how_to_report() -> None:
    text = model_card(**BASE)
    block = text.split(BEGIN)[1].split(END)[0]
    assert "rosu report" in block
    assert text.index(END) < text.index("## Settings")


def test_a_report_fills_its_place_and_nothing_else() -> None:
    text = model_card(**BASE)
    once = with_report(text, "| a |\n|---|\n| 1 |")
    start, rest = once.split(BEGIN)
    block, end = rest.split(END)
    assert block == "\n## Report\n\n| a |\n|---|\n| 1 |\n"
    assert (start, end) == (text.split(BEGIN)[0], text.split(END)[1])
    assert with_report(once, "| a |\n|---|\n| 1 |") == once
    assert with_report(once, "other").count("## Report") == 1


def test_a_card_without_the_place_gets_it_at_the_end() -> None:
    text = with_report("# mine\n", "new")
    assert text == f"# mine\n\n{BEGIN}\n## Report\n\nnew\n{END}\n"
    assert with_report(text, "newer") == text.replace("new\n", "newer\n")
    assert with_report("", "new").startswith(BEGIN)


def test_what_is_filled_in_cannot_end_the_place() -> None:
    text = with_report("# mine\n", f"a {END} b {BEGIN} c")
    assert text.count(BEGIN) == text.count(END) == 1
    assert with_report(text, "x").count("a ") == 0


@pytest.mark.parametrize("card", [f"{END} {BEGIN}", BEGIN, END, f"{BEGIN} {END} {BEGIN} {END}"])
def test_damaged_places_are_refused(card: str) -> None:
    with pytest.raises(DataError, match="not one pair"):
        with_report(card, "x")


def test_a_card_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(with_report(model_card(**BASE), "| `rho` | `9` |"), encoding="utf-8")
    card = read_card(path)
    assert card.base_model == BASE["base_model"]
    assert card.settings == {key: str(value) for key, value in BASE["settings"].items()}
    assert card.versions == BASE["versions"]


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"---\n: [\n---\n", b"---\n- a\n---\n", b"# other\n"])
def test_any_other_card_says_nothing(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "README.md"
    if content is not None:
        path.write_bytes(content)
    assert read_card(path) == Card()
