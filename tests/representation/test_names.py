"""Layer stacks and trainable parameters: found unambiguously, or refused with what exists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from rosu_llm.errors import ConfigError
from rosu_llm.representation.names import check_target, layer_index, layer_stack, trainable_names
from tests.models import FAMILIES, tiny_decoder
from tests.representation.running import parameter_names, pattern

NAMES = [f"model.layers.{i}.mlp.{part}_proj.weight" for i in range(16) for part in ("up", "down")] + ["lm_head.weight"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_understood(family: str) -> None:
    model = tiny_decoder(family)
    assert layer_stack(model) == "model.layers"
    names = [name for name, _ in model.named_parameters()]
    assert trainable_names(names, pattern(family), "model.layers", 2) == parameter_names(family)


class Twins(nn.Module):
    """Two lists of the same length."""

    def __init__(self, first: int = 3, second: int = 3) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace(num_hidden_layers=3)
        self.encoder = nn.ModuleList(nn.Linear(1, 1) for _ in range(first))
        self.decoder = nn.ModuleList(nn.Linear(1, 1) for _ in range(second))


def test_an_ambiguous_stack_is_named() -> None:
    with pytest.raises(ConfigError, match=r"fits encoder, decoder of .*encoder \(3\), decoder \(3\).*Set layer_stack"):
        layer_stack(Twins())
    assert layer_stack(Twins(), "decoder") == "decoder"
    assert layer_stack(Twins(), "^de.*") == "decoder"
    assert layer_stack(Twins(first=2)) == "decoder"


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        (Twins(1, 2), None, r"fits none of its module lists: encoder \(1\), decoder \(2\)"),
        (Twins(), "layers", r"layer_stack='layers' fits none.*encoder \(3\), decoder \(3\)"),
        (Twins(), "coder", r"fits encoder, decoder"),
        (Twins(), "dec(oder", "layer_stack='dec.oder' is not a regular expression"),
        (nn.Linear(1, 1), "layers", "none at all"),
    ],
)
def test_a_wrong_stack_lists_what_there_is(model: Any, name: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        layer_stack(model, name)
    assert "\n" not in str(caught.value)


def test_layers_are_whole_numbers_of_the_stack() -> None:
    assert layer_index("model.layers.15.mlp.up_proj.weight", "model.layers") == 15
    assert layer_index("layers.1.x", "layers") == 1
    assert layer_index("vision.layers.1.x", "model.layers") is None
    assert layer_index("mylayers.1.x", "layers") is None
    chosen = trainable_names(NAMES, r"layers\.(5|6|7)\.mlp\.down_proj\.weight$", "model.layers", 7)
    assert chosen == [f"model.layers.{i}.mlp.down_proj.weight" for i in (5, 6, 7)]  # not 15


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (r"layers\.(5|6|7)\.mlp\.fc2\.weight$", r"matches no parameter\. The nearest are .*model\.layers\.\d+\.mlp"),
        ("nonsense", r"matches no parameter\. The nearest are model\.layers"),
        ("weight", r"also matches lm_head\.weight, outside the decoder layers: make it narrower, e\.g\. layers"),
        ("down_proj", r"layer 8, 9, 10, 11, 12, 13, 14, 15, above target_layer=7.*Raise target_layer"),
        (r"layers\.8\.mlp", r"layer 8, above target_layer=7: they would get no gradient"),
        ("layers.(5", "trainable_parameters='layers.\\(5' is not a regular expression"),
    ],
)
def test_wrong_parameters_are_refused(wrong: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        trainable_names(NAMES, wrong, "model.layers", 7)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layer", [-1, 4, 32])
def test_the_target_must_be_a_layer(layer: int) -> None:
    with pytest.raises(ConfigError, match=f"target_layer={layer} .* has 4: give 0 to 3"):
        check_target(layer, 4)
    check_target(0, 4)
    check_target(3, 4)
