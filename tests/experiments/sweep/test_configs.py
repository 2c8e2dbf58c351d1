"""Every space that ships is read against the real settings, on top of the recipe it is meant for."""

from __future__ import annotations

from pathlib import Path

import pytest

from rosu_llm.experiments.sweep.space import read_space
from rosu_llm.recipes.settings import read_config
from tests.conftest import ROOT

SPACES = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
RECIPES = ROOT / "configs" / "recipes"


def test_there_are_spaces() -> None:
    assert "tofu_llama-3.2-1b" in {path.stem for path in SPACES}


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_every_space_fits_its_recipe(path: Path) -> None:
    recipe = RECIPES / path.name
    values = read_config(recipe if recipe.is_file() else RECIPES / "tofu_llama-3.2-1b.yaml")
    space = read_space(path, [], {**values, "bf16": False})  # bf16 asks for a device that is not here
    assert {axis.key for axis in space.axes} == set(read_config(path))
    assert {"learning_rate", "rho"} <= set(space.as_dict())
