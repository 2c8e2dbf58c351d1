"""One table in every format."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from rosu_llm.errors import ConfigError
from rosu_llm.evaluation.tofu.methods import best_by_agg_mu, check_selectable, describe, method_of
from rosu_llm.presentation.blocks import Row, Table, TableCell, text_table
from rosu_llm.presentation.writers import render

TABLE = Table(
    ("Agg_MU", "Priv"),
    (
        Row("Initial", (TableCell(0.99), TableCell(1.0)), reference=True),
        Row("A_1", (TableCell(0.504), TableCell(None, 1)), details={"source": "a.json"}),
        Row("B|100%", (TableCell(0.496), TableCell(0.25))),
    ),
    notes=("x_y & 5%",),
    footnotes=("Priv needs | more.",),
)


def test_markdown() -> None:
    assert render(TABLE, "markdown", bold=True) == (
        "| method | Agg_MU | Priv |\n"
        "|---|---:|---:|\n"
        "| *Initial* | 0.99 | 1.00 |\n"
        "| A_1 | **0.50** | – [1] |\n"
        "| B\\|100% | **0.50** | **0.25** |\n"
        "\nx_y & 5%\n"
        "\n[1] Priv needs | more.\n"
    )


def test_latex() -> None:
    assert render(replace(TABLE, digits=3), "latex", bold=True).splitlines() == [
        r"\begin{tabular}{lcc}",
        r"\toprule",
        r"\textbf{Method} & \textbf{Agg$_{\text{MU}}$} & \textbf{Priv} \\",
        r"\midrule",
        r"\textit{Initial} & 0.990 & 1.000 \\",
        r"\midrule",
        r"A\_1 & \textbf{0.504} & --\textsuperscript{1} \\",
        r"B\textbar{}100\% & 0.496 & \textbf{0.250} \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\par{\footnotesize x\_y \& 5\%}",
        r"\par{\footnotesize \textsuperscript{1} Priv needs \textbar{} more.}",
    ]


def test_headings_in_latex() -> None:
    table = Table(("Agg_MU (MU only)", "Util (MU only)", "a_b_c"), ())
    assert r"\textbf{Agg$_{\text{MU}}$ (MU only)} & \textbf{Util (MU only)} & \textbf{a$_{\text{b}}$\_c}" in render(
        table, "latex"
    )


def test_json_is_unrounded_and_says_why_something_is_missing() -> None:
    content = json.loads(render(replace(TABLE, digits=1), "json"))
    assert content["columns"] == ["Agg_MU", "Priv"]
    assert content["rows"][1] == {
        "method": "A_1",
        "Agg_MU": 0.504,
        "Priv": None,
        "reference": False,
        "missing": {"Priv": "Priv needs | more."},
        "source": "a.json",
    }


def test_the_best_is_judged_as_shown_and_never_a_reference() -> None:
    assert TABLE.best() == {(1, 1), (2, 1), (2, 2)}
    assert replace(TABLE, digits=3).best() == {(1, 1), (2, 2)}
    assert "**" not in render(TABLE, "markdown")


def test_text_tables_align_figures_and_say_nothing_as_nothing() -> None:
    table = text_table("c", ("what", "size", "why"), [("a", "0.5", ""), ("b", "–", "x|y")], marked=frozenset({(0, 1)}))
    assert table.numeric == (False, True, False)
    assert render(table, "markdown") == "| what | size | why |\n|---|---:|---|\n| a | **0.5** |  |\n| b | – | x\\|y |\n"


def test_the_terminal_shows_labels_figures_and_notes() -> None:
    from rich.console import Console

    from rosu_llm.presentation.writers import print_table

    console = Console(width=80, file=io.StringIO(), record=True)
    print_table(replace(TABLE, caption="[b]above"), console)
    text = console.export_text()
    for part in ("A_1", "0.50", "– [1]", "B|100%", "x_y & 5%", "[1] Priv needs | more."):
        assert part in text


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'markdown'"):
        render(TABLE, "markdwon")


@pytest.mark.parametrize(
    ("label", "method"),
    [
        ("ROSU_rho0.4_lr1e-5", "ROSU"),
        ("ROSU_matched_rho0.40_lr1e-05", "ROSU_matched"),
        ("GradDiff", "GradDiff"),
        ("UNDIAL_lr1e-4_beta3_alpha1/checkpoint-60", "UNDIAL"),
        ("lr1e-5", "lr1e-5"),
    ],
)
def test_the_method_in_a_runs_name(label: str, method: str) -> None:
    assert method_of(label) == method


def test_selection_takes_the_largest_agg_mu_of_each_method() -> None:
    methods = ["A", "B", "A", "A", "B", "A"]
    scores = [0.0, 0.3, 0.5, None, 0.2, 0.5]
    best = best_by_agg_mu(methods, scores)
    assert best == {"A": 2, "B": 1}
    text = describe(best, methods, list("uvwxyz"), scores)
    assert "no privacy figure was used" in text
    assert "A: w (of 4)" in text


def test_a_method_without_agg_mu_is_shown_but_not_selected() -> None:
    assert best_by_agg_mu(["A"], [0.0]) == {"A": 0}
    methods, scores = ["A", "B", "B", "C", "C"], [0.4, None, None, None, 0.0]
    best = best_by_agg_mu(methods, scores)
    assert best == {"A": 0, "B": 1, "C": 4}
    assert "as none has Agg_MU: B." in describe(best, methods, list("abcde"), scores)
    check_selectable("C", 0.0)
    with pytest.raises(Exception, match="No run of B can be selected: Agg_MU is missing"):
        check_selectable("B", None)
