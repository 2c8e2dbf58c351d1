"""One cell, one canonical form."""

from __future__ import annotations

import pytest

from rosu_llm.errors import ConfigError
from rosu_llm.experiments.attempt import cell_key
from rosu_llm.experiments.config_task import complete
from rosu_llm.recipes.settings import WITHOUT_OUTPUT


@pytest.mark.parametrize(
    "same",
    [
        {"rho": "0.4"},
        {"rho": 0.4, "method": "rosu", "jacobian": "relaxed"},
        {"learning_rate": "5e-5", "retain_weight": 1},  # the defaults, one of them as YAML's integer
        {"output_dir": "elsewhere", "seed": 7, "save_strategy": "epoch", "logging_steps": 10},
        WITHOUT_OUTPUT,
    ],
)
def test_the_same_run_written_otherwise(same: dict[str, object]) -> None:
    assert cell_key({}, complete(same), 0) == cell_key({}, complete({}), 0)  # 1 and 1.0 are equal, their JSON is not


@pytest.mark.parametrize(
    "other",
    [{"rho": 0.5}, {"method": "uam"}, {"learning_rate": 1e-3}, {"retain_per_forget": 2}, {"lora_r": 4}, {"beta": 0.1}],
)
def test_another_run(other: dict[str, object]) -> None:
    assert complete(other) != complete({})


def test_a_number_in_a_field_that_takes_names() -> None:
    assert len({cell_key({}, complete({"beta": value}), 0) for value in ("1", 1.0, "1e0", 1)}) == 1


def test_defaults_of_the_method_are_written_out() -> None:
    found = complete({"learning_rate": 1e-3})
    assert (found["kappa"], found["retain_per_forget"], found["learning_rate"]) == (0.5, 1, 1e-3)
    assert "weight_decay" not in found
    hidden = complete({"forget_loss": "representation", "retain_loss": "representation"})
    assert hidden["target_layer"] == 7


def test_impossible_values_pass_and_unknown_names_do_not() -> None:
    assert complete({"rho": -1.0})["rho"] == -1.0  # the cell fails, the others go on
    with pytest.raises(ConfigError, match="Did you mean rho"):
        complete({"rhoo": 1.0})
