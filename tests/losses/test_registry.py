"""Losses by name: what is registered can be found, what cannot work says so and names the nearest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rosu_llm import register_loss
from rosu_llm.errors import ConfigError
from rosu_llm.losses import LOSSES, LossContext, get_loss


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = dict(LOSSES)
    yield
    LOSSES.clear()
    LOSSES.update(before)


def test_the_shipped_losses_and_their_roles() -> None:
    assert {(name, role) for name, spec in LOSSES.items() for role in spec.roles} >= {
        ("nll", "forget"),
        ("nll", "retain"),
        ("kl", "retain"),
        ("npo", "forget"),
        ("simnpo", "forget"),
    }
    assert LOSSES["nll"].unit == LOSSES["kl"].unit == "token"
    assert LOSSES["npo"].unit == LOSSES["simnpo"].unit == "sequence"
    assert (LOSSES["npo"].reference, LOSSES["kl"].reference, LOSSES["simnpo"].reference) == (
        "logprobs",
        "distributions",
        "none",
    )


def test_a_registered_loss_is_found_with_its_options() -> None:
    @register_loss("confusion", unit="sequence", roles=("forget",), reference="logprobs", sharpness=2.0)
    def confusion(model: Any, batch: Any, context: LossContext) -> Tensor:
        return torch.tensor(context.options["sharpness"])

    spec = get_loss("confusion", "forget")
    assert spec.function is confusion
    assert (spec.name, spec.unit, spec.roles, spec.reference) == ("confusion", "sequence", ("forget",), "logprobs")
    assert dict(spec.options) == {"sharpness": 2.0}
    assert float(confusion(None, {}, LossContext(spec.options))) == 2.0
    with pytest.raises(ConfigError, match="cannot work as a retain loss"):
        get_loss("confusion", "retain")


def test_defaults_serve_both_roles_per_token_without_reference() -> None:
    register_loss("plain")(lambda model, batch, context: torch.zeros(()))
    spec = get_loss("plain", "forget")
    assert spec is get_loss("plain", "retain")
    assert (spec.unit, spec.reference, dict(spec.options)) == ("token", "none", {})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"unit": "tokens"}, "unit 'tokens'.*Did you mean 'token'"),
        ({"reference": "logit"}, "reference 'logit'.*'logits'"),
    ],
)
def test_registering_nonsense_is_refused_and_registers_nothing(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register_loss("odd", **wrong)
    assert "odd" not in LOSSES


def test_unknown_names_the_nearest_and_only_what_fits_the_role() -> None:
    with pytest.raises(ConfigError, match=r"forget_loss 'simpno'.*Did you mean 'simnpo'") as caught:
        get_loss("simpno", "forget")
    assert "kl" not in str(caught.value)
    with pytest.raises(ConfigError, match="retain_loss 'xyzzy'") as caught:
        get_loss("xyzzy", "retain")
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "role", "instead"), [("kl", "forget", "nll, npo, .*simnpo"), ("npo", "retain", "kl, nll")]
)
def test_a_loss_in_the_wrong_role_is_refused_with_the_ones_that_fit(name: str, role: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"{role}_loss='{name}'.*{instead}"):
        get_loss(name, role)
