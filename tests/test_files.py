"""Conditions under which results were made are compared as a file holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rosu_llm.files import changed_conditions


def test_equal_conditions_have_no_difference() -> None:
    written = {"recipe": {"rho": 0.4, "method": "rosu"}, "sizes": [1, 2], "3": "a", "limit": None, "data": "x"}
    assert not changed_conditions(
        written, {"data": Path("x"), "sizes": (1, 2), "recipe": {"method": "rosu", "rho": 0.4}, 3: "a"}
    )
    assert not changed_conditions({}, {})


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        ({"recipe": {"rho": 0.4}}, {"recipe": {"rho": 0.5}}, ["recipe.rho was 0.4, now 0.5"]),
        ({}, {"limit": 3}, ["limit was not set, now 3"]),
        ({"b": 1, "a": {"x": [1]}}, {"a": {"x": [2]}}, ["a.x was [1], now [2]", "b was 1, now not set"]),
        ({"space": {}}, {"space": {"rho": 1}}, ["space was {}, now not set", "space.rho was not set, now 1"]),
        ({"a": 1}, {}, ["a was 1, now not set"]),
    ],
)
def test_differences_name_the_key_and_both_values(
    before: dict[str, object], now: dict[str, object], text: list[str]
) -> None:
    assert changed_conditions(before, now) == text
