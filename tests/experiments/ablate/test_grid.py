"""Which cells a grid consists of."""

from __future__ import annotations

import pytest

from rosu_llm.errors import ConfigError
from rosu_llm.experiments.ablate.grid import GRIDS, free_grid, named_grid
from rosu_llm.experiments.config_task import complete, known_settings
from rosu_llm.geometry import METHODS

KNOWN = known_settings({}) | {"protect_rank"}


def settings(name: str, **base: object) -> list[dict[str, object]]:
    return [dict(variant.settings) for variant in named_grid(name, base, KNOWN).variants]


def test_components_are_the_rows_of_the_papers_table() -> None:
    grid = named_grid("components", {"amplify": "direct"}, KNOWN)
    assert grid.columns == ("βδ", "ηv")
    assert [(v.label, v.settings["components"], v.settings["jacobian"], *v.marks) for v in grid.variants] == [
        ("ROSU", "full", "relaxed", "✓", "✓"),
        ("zero-order", "full", "none", "✓", "✓*"),
        ("βδ only", "delta_only", "relaxed", "✓", "✗"),
        ("ηv only", "v_only", "relaxed", "✗", "✓"),
    ]
    assert not any("amplify" in v.settings for v in grid.variants)
    assert len(grid.notes) == 1


@pytest.mark.parametrize("amplify", ["auto", "matched", None])
def test_components_share_a_pull_that_every_row_can_have(amplify: str | None) -> None:
    base = {} if amplify is None else {"amplify": amplify}
    assert [row["amplify"] for row in settings("components", **base)] == ["optimizer"] * 4
    assert "optimizer" in named_grid("components", base, KNOWN).notes[1]


def test_sweeps_have_the_papers_values() -> None:
    assert settings("rho") == [{"rho": v} for v in (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)]
    assert settings("rank") == [{"protect_rank": v} for v in (1, 2, 4, 8)]
    assert settings("retain_batch") == [{"retain_per_forget": v} for v in (1, 2, 4, 8)]
    assert [row["jacobian"] for row in settings("jacobian")] == ["relaxed", "none", "exact", "no_a1", "no_a2"]
    assert [row["method"] for row in settings("methods")] == list(METHODS)


def test_a_grid_over_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="'rank' varies 'protect_rank', which is no setting of this version"):
        named_grid("rank", {}, KNOWN - {"protect_rank"})


def test_an_unknown_grid_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'components'"):
        named_grid("component", {}, KNOWN)
    assert set(GRIDS) == {"components", "jacobian", "rank", "rho", "retain_batch", "methods"}


def test_axes_give_all_combinations_with_typed_values() -> None:
    grid = free_grid(["method=rosu,uam", "rho=0.1,2e-1"], {}, {})
    assert grid.axes == ("method", "rho")
    assert [dict(v.settings) for v in grid.variants] == [
        {"method": m, "rho": r} for m in ("rosu", "uam") for r in (0.1, 0.2)
    ]
    assert grid.variants[1].label == "method = rosu, ρ = 0.2"


def test_methods_that_are_named_after_a_loss_are_rows_of_their_own() -> None:
    variants = free_grid(["method=npo,simnpo,graddiff"], {}, {}).variants
    made = [complete(dict(variant.settings)) for variant in variants]
    assert [(own["method"], own["forget_loss"]) for own in made] == [
        ("graddiff", "npo"),
        ("graddiff", "simnpo"),
        ("graddiff", "nll"),
    ]
    assert [variant.label for variant in variants] == ["method = npo", "method = simnpo", "method = graddiff"]


def test_numbers_of_settings_that_also_take_names_are_numbers() -> None:
    assert [v.settings["beta"] for v in free_grid(["beta=tied,0.1,1"], {}, {}).variants] == ["tied", 0.1, 1.0]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (["rho"], "write --axis key=v1,v2"),
        (["rho="], "write --axis key=v1,v2"),
        (["rho=0.1,,0.2"], "write --axis key=v1,v2"),
        (["=1"], "write --axis key=v1,v2"),
        (["rho=0.1,abc"], "rho='abc' cannot be read as float"),
        (["rhoo=0.1"], "Did you mean rho"),
        (["rho=0.1,0.10"], "twice"),
        (["rho=0.1", "rho=0.2"], "a second --axis both set rho"),
        (["kappa=0.1,0.2"], "--kappa both set kappa"),
        (["seed=0,1"], "use --seeds 0 1 2"),
        (["output-dir=a"], "use --out DIR"),
    ],
)
def test_bad_axes_are_one_clear_error(axes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        free_grid(axes, {}, {"kappa": 0.3})
    assert "\n" not in str(caught.value)
