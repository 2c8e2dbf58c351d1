"""ΔScore: the paper's own rows, its standard error against simulation, signs, missing pieces."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from rosu_llm.evaluation.wmdp.document import WmdpScore, delta_score, paired_stderr
from rosu_llm.presentation.wmdp import PAPER


def score(accuracy: float, error: float | None = 0.01) -> WmdpScore:
    return {"accuracy": accuracy, "stderr": error, "questions": 99}


def scores(mmlu: float, bio: float, cyber: float, error: float | None = 0.01) -> dict[str, WmdpScore]:
    return {"mmlu": score(mmlu, error), "wmdp_bio": score(bio, error), "wmdp_cyber": score(cyber, error)}


@pytest.mark.parametrize("name", PAPER["table"])
def test_the_papers_rows_follow_from_its_definition(name: str) -> None:
    """Also a check of scale: in percent or with another chance level none of them would."""
    printed, *row = PAPER["table"][name]
    base = PAPER["table"]["Base"][1]
    assert round(delta_score(scores(*row), score(base, None))["value"], 3) == printed


def test_the_papers_rows_are_those_of_the_paper(shared_data: Path) -> None:
    source = shared_data.parent / "paper" / "rosu.tex"
    if not source.is_file():
        pytest.skip("the paper is not here")
    plain = re.sub(r"\\(textbf|textit)\{([^}]*)\}", r"\2", source.read_text(encoding="utf-8"))
    section = plain[plain.index(r"\rd{WMDP}") :]
    rows = re.findall(r"^(\w+)\s*&\s*([\d.]+) & ([\d.]+) & ([\d.]+) & ([\d.]+) \\\\", section, re.MULTILINE)
    assert {name: tuple(map(float, figures)) for name, *figures in rows[:7]} == PAPER["table"]
    ablation = plain[plain.index(r"\label{tab:ablation_wmdp}") :]
    found = re.findall(r"mark(?:\$\^\*\$)?\s*& ([\d.]+) & ([\d.]+) & ([\d.]+) \\\\", ablation)
    assert [tuple(map(float, row)) for row in found] == [row[1:] for row in PAPER["ablation"].values()]


def test_signs_do_not_matter() -> None:
    below = delta_score(scores(0.50, 0.20, 0.15), score(0.58, 0.01))
    above = delta_score(scores(0.66, 0.30, 0.35), score(0.58, 0.01))
    assert below["value"] == pytest.approx(above["value"]) == pytest.approx(0.08 + 0.05 + 0.10)
    assert below["stderr"] == pytest.approx(above["stderr"])
    assert below["terms"] == pytest.approx({"mmlu": 0.08, "wmdp_bio": 0.05, "wmdp_cyber": 0.10})


def test_paired_error_is_that_of_the_mean_difference() -> None:
    mine, base = "1101001011", "1001101010"
    differences = np.array([int(a) for a in mine]) - np.array([int(b) for b in base])
    assert paired_stderr(mine, base) == pytest.approx(differences.std(ddof=1) / math.sqrt(10))
    assert paired_stderr(mine, mine) == 0.0
    assert paired_stderr("1", "0") is None


def test_without_answers_the_error_is_that_of_independent_samples() -> None:
    delta = delta_score(scores(0.5, 0.3, 0.3, 0.03), score(0.58, 0.04))
    assert delta["method"] == "independent"
    assert delta["mmlu_difference_stderr"] == pytest.approx(0.05)
    assert delta["stderr"] == pytest.approx(math.sqrt(0.05**2 + 2 * 0.03**2))
    assert delta_score(scores(0.5, 0.3, 0.3, None), score(0.58, 0.04))["stderr"] is None


def test_the_error_is_the_spread_over_repeated_experiments() -> None:
    """Correlated answers of two models, terms well away from 0; 5 % is three errors of 2000 repetitions."""
    random = np.random.default_rng(0)
    n, values, errors = 300, [], []

    def measured(right: np.ndarray) -> WmdpScore:
        return score(float(right.mean()), float(right.std(ddof=1) / math.sqrt(len(right))))

    for _ in range(2000):
        base = random.random(n) < 0.6
        mine = np.where(random.random(n) < 0.8, base, random.random(n) < 0.1)  # mostly the same answers, fewer right
        row = {"mmlu": measured(mine)}
        row |= {task: measured(random.random(n) < p) for task, p in (("wmdp_bio", 0.5), ("wmdp_cyber", 0.05))}
        text = ["".join("01"[int(right)] for right in answers) for answers in (mine, base)]
        delta = delta_score(row, measured(base), *text)
        values.append(delta["value"])
        errors.append(delta["stderr"])
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.05)
