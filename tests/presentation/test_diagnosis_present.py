"""Advice, tables, files and figures of a diagnosis; the command; the trainer's route."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rosu_llm.analysis.coupling.advice import COLLINEAR, HIGH, VANISHING, WEAK
from rosu_llm.analysis.coupling.diagnosis import SCHEMA, describe
from rosu_llm.cli.main import main
from rosu_llm.errors import DataError
from rosu_llm.presentation.coupling import coupling_section, read_diagnosis, screen_tables
from rosu_llm.presentation.writers import markdown
from tests.analysis.quadratic import SIZE, Problem
from tests.analysis.test_diagnosis_closed_form import make, measure
from tests.models import samples, tiny_llama


def plane(cosine: float, *, forget: float = 1.0, retain: float = 1.0, neutral_curvature: float = 0.0) -> Problem:
    """One pair in a plane: f at this angle from r, curvature of L_r along the neutral direction only."""
    f, r, b = np.zeros(SIZE), np.zeros(SIZE), np.zeros((SIZE, SIZE))
    f[:2] = forget * np.array([cosine, np.sqrt(1 - cosine**2)])
    r[0] = retain
    b[1, 1] = neutral_curvature
    rows = np.ones((4, 1))
    return Problem(rows * f, rows * r, np.zeros((SIZE, SIZE)), b, np.zeros(SIZE))


@pytest.mark.parametrize(
    ("problem", "regime", "words"),
    [
        (plane(0.8), "high", "High coupling (cos θ = 0.80"),
        (plane(0.3), "moderate", "Moderate coupling"),
        (plane(0.02), "weak", "nearly the same"),
        (plane(-0.5), "negative", "no damage to avoid"),
        (plane(0.3, neutral_curvature=20.0), "curvature", "use ρ below 0.33"),
        (plane(0.5, retain=1e-4), "vanishing", "The retain gradient vanishes"),
        (plane(0.5, forget=1e-7), "vanishing", "The forget gradient vanishes"),
        (plane(0.9999), "collinear", "nearly parallel"),
        (plane(1.0), "collinear", "2 of 2 pairs would fall back"),
    ],
)
def test_the_advice_names_the_regime(problem: Problem, regime: str, words: str) -> None:
    found = measure(problem, pairs=2, forget_batch_size=2, retain_batch_size=2, rho=0.4)
    assert found.document["advice"]["regime"] == regime
    assert words in found.advice
    assert found.advice.count(". ") == 0  # one sentence


def test_curvature_advice_gives_the_radius_at_which_the_curves_cross() -> None:
    """gap = ρ·cos − ½ρ²(0 − …): std feels sin²·h, neutral h; they cross at 2·cos/(h·cos²)."""
    found = measure(plane(0.3, neutral_curvature=5.0), pairs=1, forget_batch_size=1, retain_batch_size=1, rhos=(8.0,))
    crossing = 2 * 0.3 / (5.0 * (1 - (1 - 0.3**2)))
    assert found.document["radius"]["mean_crossing"] == pytest.approx(crossing)
    assert f"use ρ below {crossing:.2g}" in found.advice


def test_thresholds_are_in_order() -> None:
    assert 0.0 < WEAK < HIGH < 1.0
    assert 0.0 < COLLINEAR < np.sqrt(1 - HIGH**2)
    assert 0.0 < VANISHING < 0.5


def test_describe_leaves_out_what_is_not_finite() -> None:
    assert describe([1.0, None, 3.0, float("inf")])["mean"] == 2.0
    assert describe([2.0])["std"] is None
    assert set(describe([]).values()) == {None}


def test_files_hold_the_same_figures(tmp_path: Path) -> None:
    found = measure(make())
    written = found.save(tmp_path)
    assert {path.name for path in written} == {
        "diagnosis.json",
        "diagnosis.md",
        "diagnosis_cosine.png",
        "diagnosis_parts.png",
        "diagnosis_segments.png",
    }
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in written}  # nothing half-written
    document = read_diagnosis(tmp_path / "diagnosis.json")
    assert document == json.loads(json.dumps(found.document))
    assert document["schema"] == SCHEMA
    page = (tmp_path / "diagnosis.md").read_text()
    assert found.advice in page
    assert "diagnosis_segments.png" in page
    assert f"{document['coupling']['cosine']['mean']:.3g}" in page
    for name in ("diagnosis_cosine.png", "diagnosis_parts.png", "diagnosis_segments.png"):
        assert (tmp_path / name).stat().st_size > 5_000


def test_what_is_no_diagnosis_is_refused(tmp_path: Path) -> None:
    for content in ("{", "[]", '{"schema": "rosu/other/1"}'):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(DataError, match=r"x\.json"):
            read_diagnosis(tmp_path / "x.json")
    with pytest.raises(DataError):
        read_diagnosis(tmp_path / "missing.json")


def test_where_all_pairs_fall_back_tables_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measure(plane(1.0), pairs=2, forget_batch_size=2, retain_batch_size=2)
    found.show()
    assert "2 would fall back" in " ".join(capsys.readouterr().out.split())
    assert "diagnosis_segments.png" not in {path.name for path in found.save(tmp_path)}


def test_tables_on_screen_are_short_and_whole_in_the_file() -> None:
    document = measure(make()).document
    section = coupling_section(document)
    assert "Coupling by layer" in markdown.section(section)
    assert "Coupling by layer" not in [table.caption for table in screen_tables(document)]
    for table in [*section.tables, *(figure.data for figure in section.figures)]:
        assert all(len(line) == len(table.headings) for line in table.lines())


# -- the command and the trainer's route ----------------------------------------------------------


@pytest.fixture
def local_run(tmp_path: Path) -> list[str]:
    """Flags of a run on a small folder model and two files."""
    from rosu_llm.toys import toy_values

    values = toy_values({}, tmp_path / "toys")
    flags = [f"--{key.replace('_', '-')}={values[key]}" for key in ("model_name_or_path", "forget_data", "retain_data")]
    return [*flags, "--use-cpu", "true", "--pairs", "2", "--points", "0", "--per-device-train-batch-size", "2"]


def diagnose(flags: list[str], out: Path) -> dict[str, Any]:
    assert main(["diagnose", *flags, "--out", str(out)]) == 0
    return read_diagnosis(out / "diagnosis.json")


def test_the_command_measures_what_python_measures(
    local_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer's losses, batches and space give the figures of measure_coupling on the same samples."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rosu_llm import measure_coupling
    from rosu_llm.data.sources import load_samples

    found = diagnose(
        [*local_run, "--gradient-accumulation-steps", "2", "--rhos", "0.2", "--rho", "0.1"], tmp_path / "o"
    )
    assert found["settings"]["forget_batch_size"] == 4  # the run's window
    assert [row["rho"] for row in found["at_rho"]] == [0.1, 0.2]
    assert "coupling" in capsys.readouterr().out.lower()
    assert not [path for path in (tmp_path / "o").iterdir() if path.name.startswith("checkpoint")]
    (name,) = (flag.split("=")[1] for flag in local_run if flag.startswith("--model"))
    tokenizer = AutoTokenizer.from_pretrained(name)
    forget, retain = (
        load_samples(flag.split("=")[1], tokenizer)
        for flag in local_run
        if flag.startswith(("--forget-d", "--retain-d"))
    )
    truth = measure_coupling(
        AutoModelForCausalLM.from_pretrained(name), forget, retain, pairs=2, forget_batch_size=4, retain_batch_size=4,
        rhos=(0.2,), rho=0.1, points=0, seed=42, progress=False,
    ).document  # fmt: skip
    for a, b in zip(found["per_pair"], truth["per_pair"], strict=True):
        assert a["cosine"] == pytest.approx(b["cosine"], rel=1e-4)
        assert a["retain_loss"] == pytest.approx(b["retain_loss"], rel=1e-5)
    assert found["at_rho"][1]["neutral"]["forget_gain"] == pytest.approx(
        truth["at_rho"][1]["neutral"]["forget_gain"], rel=1e-3
    )


def test_lora_and_npo_through_the_command(local_run: list[str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    found = diagnose([*local_run, "--lora-r", "2", "--forget-loss", "npo", "--rhos", "0.4"], tmp_path / "o")
    assert all("LoRA" in row["kind"] for row in found["by_kind"])
    assert found["settings"]["forget_loss"] == "npo"


def test_representation_level_says_that_retain_starts_at_its_minimum(tmp_path: Path) -> None:
    flags = ["--forget-loss", "representation", "--retain-loss", "representation", "--smoke"]
    found = diagnose(flags, tmp_path / "o")
    assert found["coupling"]["retain_square"]["max"] == 0.0
    assert found["advice"]["regime"] == "vanishing"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rhos", "0.4", "-0.1"], "rho=-0.1"),
        (["--forget-batch-size", "999"], "fewer than forget_batch_size=999"),
        (["--pairs", "0"], "pairs=0"),
    ],
)
def test_errors_are_one_line(
    flags: list[str], words: str, local_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", *local_run, *flags, "--out", str(tmp_path / "o")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rosu diagnose:")]
    assert words in line
    assert not (tmp_path / "o" / "diagnosis.json").exists()


def test_missing_data_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--model-name-or-path", "x", "--out", str(tmp_path)]) == 2
    assert "forget_data is missing" in capsys.readouterr().err


@pytest.mark.parametrize("bf16", [False, True])
def test_a_trainer_is_left_as_it_was(bf16: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Measured where training would begin: no step was taken, no optimizer state made.

    Weights on the bf16 grid lose a small perturbation when they are rounded for the forward pass; that is said.
    """
    from rosu_llm import ForgetRetainDataset, ROSUConfig, ROSUTrainer
    from rosu_llm.analysis.coupling.pairs import CouplingPlan
    from rosu_llm.analysis.coupling.recipe import measure_trainer

    model = tiny_llama().bfloat16().float()
    before = [p.detach().clone() for p in model.parameters()]
    forget, retain = samples(6, seed=1), samples(6, seed=2)
    config = ROSUConfig(output_dir=str(tmp_path), max_steps=1, use_cpu=True, bf16=bf16, report_to=[])
    trainer = ROSUTrainer(model, config, train_dataset=ForgetRetainDataset(forget, retain))
    plan = CouplingPlan(pairs=1, forget_batch_size=2, retain_batch_size=2, rhos=(1e-5,), points=0)
    found = measure_trainer(trainer, forget, retain, plan, progress=False)
    assert found.records and trainer.state.global_step == 0
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert not trainer.raw_optimizer().state
    assert all(p.grad is None for p in model.parameters())
    assert ("survived rounding" in caplog.text) == bf16
