"""The model card: a header that hubs can read, and everything needed to repeat the run."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

import rosu_llm
from rosu_llm import MethodArguments
from rosu_llm.training.model_card import model_card

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
