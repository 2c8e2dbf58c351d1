"""Published models: their aggregates come out of their components by our code, and runs stand among them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import tomllib

from rosu_llm.cli.main import main
from rosu_llm.evaluation.tofu.published import (
    FILE,
    TRANSFORM,
    best_published,
    published_models,
)
from rosu_llm.evaluation.tofu.results import read_result
from rosu_llm.evaluation.tofu.summary import ATTACKS, FLUENCY, MEMORISATION, MODEL_UTILITY, auc_transform, summarise
from rosu_llm.presentation.report.page import build
from rosu_llm.presentation.report.reading import read_runs
from tests.conftest import ROOT
from tests.evaluation.saves import FIGURES, INITIAL, RETAIN, make_run, write_eval

MODEL = "Llama-3.2-1B-Instruct"
FOLDER = ROOT / "rosu_llm" / "evaluation" / "tofu" / "published"
#: Their six decimals, each off by up to half of the last; a harmonic mean of small parts adds a little.
ROUNDING = 2e-6


def rows() -> list[dict[str, str]]:
    with (FOLDER / FILE).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def figures(row: dict[str, str], retain_auc: float) -> dict[str, float]:
    """The row as an evaluation of ours would have it: an AUC for each attack, with their transform turned round."""
    parts = ("one_minus_es", "one_minus_em", "one_minus_paraprob", "one_minus_truth")
    found = {name: 1.0 - float(row[part]) for name, part in zip(MEMORISATION.values(), parts, strict=True)}
    for name, part in zip(ATTACKS.values(), ("s_loss", "s_zlib", "s_mink", "s_minkpp"), strict=True):
        found[name] = retain_auc * (2.0 - float(row[part]))  # s = 1 − |a − r|/r
    return {**found, MODEL_UTILITY: float(row["model_utility"]), FLUENCY: float(row["fluency"])}


@pytest.mark.parametrize("retain_auc", [0.38, 0.5])
def test_their_aggregates_are_ours(retain_auc: float) -> None:
    """All 152 rows: Mem, Priv under ``privleak``, Util; and what the package shows of them."""
    assert auc_transform(TRANSFORM).formula == "s = max(0, 1 - |a-r| / r)"
    given, shown = rows(), published_models()
    assert len(given) == len(shown) == 152
    full = figures(given[0], retain_auc)
    reference = dict.fromkeys(ATTACKS.values(), retain_auc)
    for row, model in zip(given, shown, strict=True):
        ours = summarise(figures(row, retain_auc), retain=reference, target=full, transform=TRANSFORM)
        assert ours.mem == pytest.approx(float(row["mem"]), abs=ROUNDING), row["model"]
        assert ours.priv == pytest.approx(float(row["privacy_mia"]), abs=ROUNDING), row["model"]
        assert ours.util_raw == pytest.approx(float(row["utility"]), abs=ROUNDING), row["model"]
        assert model.name == row["model"]
        for name in ("mem", "priv", "util", "util_raw", "agg", "agg_mu"):
            assert getattr(model.summary, name) == pytest.approx(getattr(ours, name), abs=1e-5), (row["model"], name)


def test_their_model_utility_is_the_harmonic_mean_of_nine() -> None:
    for row in rows():
        nine = [float(row[f"{d}_{p}"]) for d in ("retain", "ra", "wf") for p in ("q_prob", "q_rouge", "truth_ratio")]
        expected = 0.0 if min(nine) == 0.0 else 9.0 / sum(1.0 / value for value in nine)
        assert float(row["model_utility"]) == pytest.approx(expected, abs=ROUNDING)


def test_the_best_of_each_method_by_agg_mu() -> None:
    best = best_published(published_models())
    assert {method: model.name for method, model in best.items()} == {
        "AltPO": "altpo_lr5e5_b01_a1_ep10",
        "GradDiff": "graddiff_lr5e5_a5_ep10",
        "IdkDPO": "idkdpo_lr5e5_b01_a1_ep10",
        "IdkNLL": "idknll_lr5e5_a2_ep5",
        "NPO": "npo_lr5e5_b01_a1_ep10",
        "RMU": "rmu_lr2e5_l5_s10_ep5",
        "SimNPO": "simnpo_lr5e5_b35_a1_d1_g025_ep10",
        "UNDIAL": "undial_lr1e4_b10_a1_ep10",
    }


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    folder = tmp_path / "saves"
    make_run(folder, 0.4, FIGURES)
    write_eval(folder / "eval" / f"tofu_{MODEL}_retain90", RETAIN)
    write_eval(folder / "eval" / f"tofu_{MODEL}_full" / "evals_forget10", INITIAL)
    return folder


def test_a_run_among_them(saves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "frontier.png"
    command = ["table", str(saves / "unlearn"), "--published", "--frontier", str(picture)]
    assert main([*command, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    labels = [row["method"] for row in found["rows"]]
    assert labels[:3] == ["Initial", "Retain", "ROSU_rho0.4"]
    assert labels.index("GradDiff") < labels.index("AltPO") < labels.index("Init. ft.")
    run = next(row for row in found["rows"] if row["method"] == "ROSU_rho0.4")
    # retain's AUCs are .4: two attacks equal, two at .7: 1 − .3/.4 = .25 under their transform
    assert run["Priv"] == pytest.approx(4.0 / (1 + 1 + 4 + 4))
    notes = " ".join(found["notes"])
    assert "AUC transform 'privleak'" in notes and "do not compare" in notes and "Mem 0.35, theirs 0.58" in notes
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["table", "--published"]) == 0
    alone = capsys.readouterr().out
    assert "| RMU | 0.60 | 0.62 | 0.64 | 0.55 | 0.61 |" in alone and "these runs" not in alone


def test_what_cannot_stand_among_them(saves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(saves / "other", 0.4, FIGURES, split="forget05")
    (saves / "alone" / "unlearn").mkdir(parents=True)
    make_run(saves / "alone", 0.4, FIGURES)
    for flags, message in (
        ([str(saves / "other" / "unlearn"), "--published"], f"is of {MODEL} on forget05"),
        ([str(saves / "alone" / "unlearn"), "--published"], "give --target PATH"),
        ([str(saves / "unlearn"), "--frontier", "x.png"], "add --published"),
    ):
        assert main(["table", *flags]) == 2
        assert message in capsys.readouterr().err


def test_the_report_shows_runs_among_them(saves: Path) -> None:
    runs = read_runs([next((saves / "unlearn").iterdir())])
    references: dict[str, Any] = {
        "target": read_result(saves / "eval" / f"tofu_{MODEL}_full" / "evals_forget10" / "TOFU_EVAL.json"),
        "retain": read_result(saves / "eval" / f"tofu_{MODEL}_retain90" / "TOFU_EVAL.json"),
    }
    section = next(s for s in build(runs, **references).sections if s.key == "metrics")
    assert any("among published models" in table.caption for table in section.tables)
    (figure,) = (figure for figure in section.figures if figure.key == "published_0")
    assert "150 published models" in figure.caption
    without = next(s for s in build(runs).sections if s.key == "metrics")  # Util is not relative then
    assert not any("published" in table.caption for table in without.tables)


def test_the_file_is_part_of_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = settings["package-data"]["rosu_llm.evaluation.tofu"]
    assert {path.name for pattern in patterns for path in FOLDER.parent.glob(pattern)} == {FILE, "README.md"}
    said = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "gnueaj/unlearning-depth-score" in said and "Apache License 2.0" in said
