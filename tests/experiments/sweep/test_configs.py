"""Every space that ships is read against the real settings, on top of the recipe it is meant for."""

from __future__ import annotations

from pathlib import Path

import pytest

from rosu_llm.experiments.sweep.space import read_space
from rosu_llm.experiments.table3 import BESIDES, ROWS
from rosu_llm.recipes.settings import build, read_config
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


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps" / "tofu").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_row_of_the_table_has_a_recipe_and_the_values_to_search(path: Path) -> None:
    values = read_config(RECIPES / "tofu" / path.name)
    space = read_space(path, [], {**values, "bf16": False})
    assert set(space.as_dict()) == set(read_config(path))
    for axis in read_config(path).values():
        assert len(axis) > 1
    chosen = {key: axis[-1] for key, axis in read_config(path).items()}
    build({**values, **chosen, "bf16": False, "use_cpu": True})


def test_there_is_a_recipe_for_every_row_of_table_3() -> None:
    """Under the contestant's name."""
    written = {path.stem for path in (RECIPES / "tofu").glob("*.yaml")}
    names = {one.removesuffix("_published").removesuffix("_paper") for one in {**ROWS, **BESIDES}.values()}
    assert names <= written
    assert {path.stem for path in (ROOT / "configs" / "sweeps" / "tofu").glob("*.yaml")} >= names
