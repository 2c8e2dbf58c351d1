"""Trainable weights in float32: without losing a bit, with a warning, and only where it can work."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from rosu_llm import ROSUConfig
from rosu_llm.errors import ConfigError, UnsupportedLayoutError
from rosu_llm.training.precision import prepare_precision
from tests.models import CleanLM, tiny_llama


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="rosu_llm")
    return caplog


def test_bf16_weights_become_the_same_numbers_in_float32(log: pytest.LogCaptureFixture) -> None:
    model = CleanLM().bfloat16()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    parameters = list(model.parameters())
    extra = prepare_precision(model, upcast=True, autocast=True)
    assert extra == 2 * sum(p.numel() for p in before.values())
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32
        assert p.requires_grad
        assert torch.equal(p, before[name].float())


def test_the_warning_says_how_much_memory_it_costs(log: pytest.LogCaptureFixture) -> None:
    """Two bytes more for each of 11 million weights: 0.02 GiB."""
    model = nn.Linear(3500, 3200, bias=False, dtype=torch.bfloat16)
    assert prepare_precision(model, upcast=True, autocast=True) == 2 * 3500 * 3200
    assert "+0.02 GiB" in log.text
    assert "upcast=False" in log.text
    assert "bf16=True" not in log.text


def test_without_autocast_the_warning_recommends_it(log: pytest.LogCaptureFixture) -> None:
    prepare_precision(CleanLM().bfloat16(), upcast=True, autocast=False)
    assert "bf16=True" in log.text


def test_tied_weights_stay_tied_and_count_once() -> None:
    model = CleanLM(tied=True).bfloat16()
    extra = prepare_precision(model, upcast=True, autocast=True)
    assert model.head.weight is model.embed.weight
    assert extra == 2 * sum(p.numel() for p in model.parameters())


def test_the_model_computes_after_upcasting() -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    prepare_precision(model, upcast=True, autocast=False)
    assert torch.isfinite(model(input_ids=torch.tensor([[4, 5, 6]])).logits).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_is_left_alone_in_silence(dtype: torch.dtype, log: pytest.LogCaptureFixture) -> None:
    model = CleanLM().to(dtype)
    assert prepare_precision(model, upcast=True, autocast=False) == 0
    assert all(p.dtype == dtype for p in model.parameters())
    assert not log.records


def test_opting_out_keeps_bf16_in_silence(log: pytest.LogCaptureFixture) -> None:
    model = CleanLM().bfloat16()
    model.mix.requires_grad_(False)
    assert prepare_precision(model, upcast=False, autocast=False) == 0
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert not log.records


@pytest.mark.parametrize("upcast", [True, False])
def test_float16_is_refused_whatever_was_asked(upcast: bool) -> None:
    with pytest.raises(UnsupportedLayoutError, match="float16"):
        prepare_precision(CleanLM().half(), upcast=upcast, autocast=True)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="No trainable parameter"):
        prepare_precision(CleanLM().requires_grad_(False), upcast=True, autocast=True)


def partly_frozen() -> CleanLM:
    model = CleanLM().bfloat16()
    model.embed.requires_grad_(False)
    return model


def test_a_part_frozen_in_bf16_needs_autocast() -> None:
    model = partly_frozen()
    with pytest.raises(ConfigError, match=r"frozen in bfloat16.*Set bf16=True"):
        prepare_precision(model, upcast=True, autocast=False)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_with_autocast_the_frozen_part_stays_bf16_and_both_compute_together() -> None:
    model = partly_frozen()
    prepare_precision(model, upcast=True, autocast=True)
    assert model.embed.weight.dtype == torch.bfloat16
    assert model.head.weight.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(model(torch.tensor([[4, 5, 6]])).logits).all()


def test_adapters_are_upcast_on_a_bf16_base_without_autocast() -> None:
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(tiny_llama(dtype=torch.bfloat16), config, autocast_adapter_dtype=False)
    prepare_precision(model, upcast=True, autocast=False)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert torch.isfinite(model(input_ids=torch.tensor([[4, 5, 6]])).logits).all()


@pytest.mark.parametrize("given", ["bf16", "fp16", "no"])
def test_a_launchers_precision_is_that_of_the_settings(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run would compute in bf16 while its record, its estimate and a resumed run say float32."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", given)
    config = ROSUConfig(output_dir=str(tmp_path), use_cpu=True)
    assert (config.bf16, config.fp16) == (given == "bf16", given == "fp16")
    config = ROSUConfig(output_dir=str(tmp_path), use_cpu=True, bf16=True)  # one's own setting decides
    assert (config.bf16, config.fp16) == (True, False)
    if given == "fp16":
        with pytest.raises(ConfigError, match="fp16=True with method='ssd'"):
            ROSUConfig(output_dir=str(tmp_path), use_cpu=True, method="ssd")
