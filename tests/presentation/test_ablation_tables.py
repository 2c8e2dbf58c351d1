"""Hand-made cells become the numbers one gets with a pencil."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from rosu_llm.experiments.ablate.cells import summarise
from rosu_llm.experiments.ablate.grid import Grid, Variant
from rosu_llm.experiments.attempt import Record
from rosu_llm.presentation.ablation import grid_table
from rosu_llm.presentation.writers import render, rich_table
from tests.experiments.ablate.stand_in import StandIn, done, failed

GRID = Grid(
    "components",
    "title",
    (Variant("ROSU", {"components": "full"}, ("✓", "✓")), Variant("ηv only", {"components": "v_only"}, ("✗", "✓"))),
    ("βδ", "ηv"),
    notes=("a note",),
)
TASK = StandIn(None, references={"retain_only": "gold"})

#: Means 2/10, 6/10; deviations √(((−0.1)² + 0² + 0.1²)/2) = 0.1 and √((0.3² + 0.3² + 0)/2) = 0.3.
FULL = {i: done(i, forget_em=f, retain_em=r) for i, (f, r) in enumerate([(0.1, 0.3), (0.2, 0.9), (0.3, 0.6)])}
GOLD = {0: done(0, forget_em=0.125, retain_em=1.0)}


def rows(**given: Mapping[int, Record]) -> dict[str, str]:
    by_label = {"gold": GOLD, "ROSU": given["full"], "ηv only": given["v_only"]}
    table = grid_table(GRID, TASK, lambda grid, label: dict(by_label[label]), [0, 1, 2])
    return {form: render(replace(table, digits=3), form) for form in ("markdown", "latex", "json")}


def test_mean_and_spread_over_seeds() -> None:
    assert rows(full=FULL, v_only={0: done(0, forget_em=1.0, retain_em=0.5)})["markdown"] == (
        "| method | βδ | ηv | forget EM | retain EM |\n"
        "|---|---:|---:|---:|---:|\n"
        "| *gold* | – | – | 0.125 | 1.000 |\n"
        "| ROSU | ✓ | ✓ | 0.200 ± 0.100 | 0.600 ± 0.300 |\n"
        "| ηv only | ✗ | ✓ | 1.000 | 0.500 |\n"
        "\nMean ± standard deviation (n − 1) over seeds 0, 1, 2.\n"
        "\na note\n"
    )


def test_latex_is_ascii_and_has_the_papers_marks() -> None:
    text = rows(full=FULL, v_only={0: done(0, forget_em=1.0, retain_em=0.5)})["latex"]
    assert text.isascii()
    assert r"\textbf{Method} & \textbf{$\beta$$\delta$} & \textbf{$\eta$v} & \textbf{forget EM}" in text
    assert r"ROSU & \checkmark{} & \checkmark{} & 0.200\,{\scriptsize$\pm$0.100} &" in text
    assert r"$\eta$v only & $\times$ & \checkmark{} & 1.000 & 0.500 \\" in text


def test_json_is_unrounded_with_every_seed() -> None:
    content = json.loads(rows(full=FULL, v_only={0: failed(0, "boom")})["json"])
    gold, rosu, v_only = content["rows"]
    assert gold["reference"] and gold["βδ"] is None
    assert rosu["forget EM"] == pytest.approx(0.2, abs=1e-15)
    assert rosu["spread"]["retain EM"] == pytest.approx(0.3, abs=1e-15)
    assert rosu["settings"] == {"components": "full"}
    assert rosu["per_seed"]["1"]["retain_em"] == 0.9
    assert (v_only["forget EM"], v_only["retain EM"]) == ("failed", "–")
    assert v_only["missing"] == {"forget EM": "failed: boom"}
    assert v_only["per_seed"]["0"]["error"] == "boom"


def test_failed_rows_say_why_once() -> None:
    all_failed = {i: failed(i, "boom | bang") for i in range(3)}
    text = rows(full=all_failed, v_only=all_failed)["markdown"]
    assert "| ROSU | ✓ | ✓ | failed [1] | – |\n| ηv only | ✗ | ✓ | failed [1] | – |\n" in text
    assert text.count("failed: boom") == 1


def test_some_seeds_failed() -> None:
    mixed = {0: done(0, forget_em=0.2, retain_em=0.4), 1: failed(1, "boom"), 2: failed(2, "bang")}
    text = rows(full=mixed, v_only=FULL)["markdown"]
    assert "| ROSU | ✓ | ✓ | 0.200 [1] | 0.400 |" in text
    assert "[1] seed 1 failed: boom seed 2 failed: bang" in text


def test_a_measure_that_some_rows_lack_is_a_dash() -> None:
    assert "| ROSU | ✓ | ✓ | – | 0.500 |" in rows(full={0: done(0, retain_em=0.5)}, v_only=FULL)["markdown"]
    assert summarise({0: done(0, retain_em=0.5)}, "forget_em") is None


def test_one_seed_is_named_and_the_terminal_shows_the_same() -> None:
    from rich.console import Console

    table = grid_table(GRID, TASK, lambda grid, label: {4: done(4, forget_em=0.25, retain_em=0.5)}, [4])
    assert table.notes[0] == "Seed 4."
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(rich_table(replace(table, digits=3)))
    text = console.export_text()
    assert "✗" in text and text.count("0.250") == 3
