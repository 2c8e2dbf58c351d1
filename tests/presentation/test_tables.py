"""One table in three formats."""

from __future__ import annotations

import json

import pytest

from rosu_llm.errors import ConfigError
from rosu_llm.evaluation.selection import best_by_agg_mu, describe, method_of
from rosu_llm.presentation.tables import Cell, Row, Table, best_cells, render

TABLE = Table(
    ("Agg_MU", "Priv"),
    (
        Row("Initial", (Cell(0.99), Cell(1.0)), reference=True),
        Row("A_1", (Cell(0.504), Cell(None, 1)), details={"source": "a.json"}),
        Row("B|100%", (Cell(0.496), Cell(0.25))),
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
    assert render(TABLE, "latex", digits=3, bold=True).splitlines() == [
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
    content = json.loads(render(TABLE, "json", digits=1))
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
    assert best_cells(TABLE, 2) == {(1, 0), (2, 0), (2, 1)}
    assert best_cells(TABLE, 3) == {(1, 0), (2, 1)}
    assert "**" not in render(TABLE, "markdown")


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
    best = best_by_agg_mu(methods, [0.0, 0.3, 0.5, None, 0.2, 0.5])
    assert best == {"A": 2, "B": 1}
    text = describe(best, methods, list("uvwxyz"))
    assert "no privacy figure was used" in text
    assert "A: w (of 4)" in text


def test_a_method_without_agg_mu_cannot_be_selected() -> None:
    assert best_by_agg_mu(["A"], [0.0]) == {"A": 0}
    with pytest.raises(Exception, match="No run of B can be selected: Agg_MU is missing"):
        best_by_agg_mu(["A", "B"], [0.4, None])
