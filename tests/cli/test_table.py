"""``rosu table``: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from rosu_llm import __version__
from rosu_llm.cli.main import main
from rosu_llm.evaluation.tofu.results import read_result
from rosu_llm.evaluation.tofu.summary import ATTACKS
from tests.evaluation.saves import FIGURES, INITIAL, RETAIN, make_run, write_eval, write_hydra, write_summary

MODEL = "Llama-3.2-1B-Instruct"
BETTER = {**FIGURES, "exact_memorization": 0.5}  # Mem = 4/(2+2+2+4) = .4
PRIVATE = {**RETAIN, "exact_memorization": 0.8}  # Priv = 1, Mem = 4/(2+5+2+4) = 4/13


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    """Three runs and both references."""
    folder = tmp_path / "saves"
    make_run(folder, 0.2, PRIVATE)
    make_run(folder, 0.4, BETTER)
    make_run(folder, 0.4, FIGURES, trainer="GradDiff", ours=False)
    write_eval(folder / "eval" / f"tofu_{MODEL}_retain90", RETAIN)
    write_eval(folder / "eval" / f"tofu_{MODEL}_full" / "evals_forget10", INITIAL)
    write_eval(folder / "eval" / f"tofu_{MODEL}_full" / "evals_forget01", INITIAL)
    return folder


def references(saves: Path) -> list[str]:
    folder = saves / "eval"
    return ["--retain", str(folder / f"tofu_{MODEL}_retain90"), "--target", str(folder / f"tofu_{MODEL}_full")]


def runs_shown(text: str) -> list[str]:
    """The labels of a table in JSON, without the references."""
    return [row["method"] for row in json.loads(text)["rows"] if not row["reference"]]


def test_the_table(saves: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(saves / "unlearn"), *references(saves), "--digits", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:7] == [
        "| method | Agg | Agg_MU | Mem | Priv | Util |",
        "|---|---:|---:|---:|---:|---:|",
        "| *Initial* | 0.000 | 0.000 | 0.000 | 0.667 | 1.000 |",
        "| *Retain* | 0.545 | 0.444 | 0.333 | 1.000 | 0.667 |",
        "| GradDiff_rho0.4 | 0.500 | 0.444 | 0.333 | 0.667 | 0.667 |",
        "| ROSU_rho0.2 | 0.522 | 0.421 | 0.308 | 1.000 | 0.667 |",
        "| ROSU_rho0.4 | 0.545 | 0.500 | 0.400 | 0.667 | 0.667 |",
    ]
    text = "\n".join(lines)
    assert "TOFU forget10, Llama-3.2-1B-Instruct" in text
    assert "AUC transform 'range'" in text
    assert "relative to the initial model" in text


def test_the_best_run_is_the_one_with_the_largest_agg_mu_not_the_most_private(
    saves: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["table", str(saves / "unlearn"), *references(saves), "--best", "--format", "json"]) == 0
    content = json.loads(capsys.readouterr().out)
    rows = {row["method"]: row for row in content["rows"] if not row["reference"]}
    assert list(rows) == ["GradDiff", "ROSU"]
    assert rows["ROSU"]["Mem"] == pytest.approx(0.4)
    assert rows["ROSU"]["Priv"] == pytest.approx(2 / 3)
    assert any("no privacy figure was used" in note and "ROSU_rho0.4 (of 2)" in note for note in content["notes"])


@pytest.mark.parametrize(("transform", "priv"), [("range", 2 / 3), ("privleak", 0.4), ("span", 0.0)])
def test_the_transform_is_used_and_named(
    transform: str, priv: float, saves: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saves / "unlearn" / f"tofu_{MODEL}_forget10_ROSU_rho0.4"
    call = ["table", str(run), *references(saves), "--auc-transform", transform, "--format", "json"]
    assert main(call) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["rows"][-1]["Priv"] == pytest.approx(priv)  # span: the initial model's AUCs are the run's own
    assert any(f"AUC transform '{transform}'" in note for note in content["notes"])


def test_what_is_missing_is_explained_not_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """OpenUnlearning's default list of metrics measures neither exact memorisation nor three of the attacks."""
    default = {"extraction_strength": 0.5, "model_utility": 0.6, "forget_Q_A_Prob": 0.2, "mia_min_k": None}
    write_summary(tmp_path / "run" / "evals", default)
    assert main(["table", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "| method | Agg (MU only) | Agg_MU (MU only) | Mem | Priv | Util (MU only) |" in out
    assert "| run | – [1] | – [2] | – [3] | – [4] | 0.60 |" in out
    assert "[1] Agg needs Mem, Priv." in out
    assert (
        "[3] Mem needs exact_memorization, forget_Q_A_PARA_Prob, forget_truth_ratio_prob_mean: evaluate with "
        "experiment=eval/tofu/rosu, or with +eval/tofu_metrics=[rosu_summary]." in out
    )
    assert "the results of the retain model: give --retain, evaluate with" in out
    assert "(mia_min_k is null in the file)" in out
    assert "raw, not relative to the initial model (give --target)" in out
    assert "nobody measured forget_Q_A_gibberish" in out
    assert f"not checked, in: {tmp_path / 'run' / 'evals' / 'TOFU_SUMMARY.json'}" in out


def test_a_column_never_mixes_two_definitions_of_utility(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, 0.2, FIGURES)
    make_run(tmp_path, 0.4, {k: v for k, v in FIGURES.items() if k != "forget_Q_A_gibberish"})
    assert main(["table", str(tmp_path), "--format", "json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [row["Util"] for row in content["rows"]] == [pytest.approx(0.4), None]
    assert "forget_Q_A_gibberish" in content["rows"][1]["missing"]["Util"]


def test_files_checkpoints_and_repetitions(saves: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = saves / "unlearn" / f"tofu_{MODEL}_forget10_ROSU_rho0.4"
    write_eval(run / "checkpoint-5" / "evals", FIGURES)
    file = run / "evals" / "TOFU_EVAL.json"
    assert main(["table", str(file), str(run), f"{run}/../{run.name}", "--format", "json"]) == 0
    assert runs_shown(capsys.readouterr().out) == ["ROSU_rho0.4"]
    assert main(["table", str(run), "--checkpoints", "--format", "json"]) == 0
    assert runs_shown(capsys.readouterr().out) == ["ROSU_rho0.4/checkpoint-5", "ROSU_rho0.4"]


def test_beside_an_excerpt_the_whole_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_eval(tmp_path, FIGURES)
    excerpt = write_summary(tmp_path, {"Mem": 0.1, "model_utility": 0.6})
    assert main(["table", str(excerpt), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["Mem"] == pytest.approx(1 / 3)


def test_references_among_the_paths_are_not_shown_twice(saves: Path, capsys: pytest.CaptureFixture[str]) -> None:
    retain = str(saves / "eval" / f"tofu_{MODEL}_retain90")
    assert main(["table", str(saves / "unlearn"), retain, "--retain", retain, "--format", "json"]) == 0
    assert runs_shown(capsys.readouterr().out) == ["GradDiff_rho0.4", "ROSU_rho0.2", "ROSU_rho0.4"]


@pytest.mark.parametrize(("name", "begins"), [("t.md", "| method"), ("t.tex", r"\begin{tabular}"), ("t.json", "{")])
def test_a_file_is_written_in_the_format_of_its_suffix(
    name: str, begins: str, saves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / name
    assert main(["table", str(saves / "unlearn"), "--out", str(out)]) == 0
    assert out.read_text().startswith(begins)
    assert capsys.readouterr().out == out.read_text()


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["table", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_mistakes_are_one_line(saves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = str(saves / "unlearn")
    (tmp_path / "empty").mkdir()
    assert "Nothing to show" in refusal([], capsys)
    assert "does not exist" in refusal([str(tmp_path / "nowhere")], capsys)
    assert "holds no TOFU_EVAL.json" in refusal([str(tmp_path / "empty")], capsys)
    assert "does not exist" in refusal([runs, "--retain", str(tmp_path / "nowhere")], capsys)
    assert "Did you mean 'range'" in refusal([runs, "--auc-transform", "Range"], capsys)
    assert "Did you mean 'latex'" in refusal([runs, "--format", "latx"], capsys)
    assert "belong together" in refusal([runs, "--contribution", str(tmp_path / "c")], capsys)
    assert "--digits -1" in refusal([runs, "--digits", "-1"], capsys)
    assert "forget split is" in refusal([str(saves)], capsys)
    retain = write_eval(saves / "eval" / f"tofu_{MODEL}_retain99", RETAIN)
    message = refusal([runs, "--retain", str(retain)], capsys)
    assert "the forget split is forget10 in" in message
    assert "but forget01 in" in message
    other = write_eval(saves / "eval" / "tofu_Llama-3.1-8B-Instruct_retain90", RETAIN)
    assert "the model is" in refusal([runs, "--retain", str(other)], capsys)


def test_smoke_needs_no_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "saves/unlearn", "--retain", "x", "--best", "--smoke"]) == 0
    assert "invented" in capsys.readouterr().out


def test_a_contribution_holds_what_the_runs_recorded_and_marks_the_rest(saves: Path, tmp_path: Path) -> None:
    run = saves / "unlearn" / f"tofu_{MODEL}_forget10_ROSU_rho0.4"
    state = {"global_step": 125, "log_history": [{"loss": 1.0}, {"train_runtime": 81.6}]}
    (run / "trainer_state.json").write_text(json.dumps(state))
    launcher = "accelerate launch --config_file configs/accelerate/default_config.yaml"
    (run / "rosu_run.json").write_text(json.dumps({"launcher": launcher, "devices": ["L40S", "L40S"]}))
    out = tmp_path / "community" / "methods" / "ROSU"
    call = ["table", str(saves / "unlearn"), *references(saves), "--contribution", str(out), "--name", "ROSU"]
    assert main(call) == 0
    readme, script = (out / "README.md").read_text(), (out / "run.sh").read_text()

    assert readme.startswith("# Retain-Neutral Surrogates for Min–Max Unlearning\n")
    assert "| `trainer.method_args.rho` | 0.4 |" in readme
    assert "| `trainer.args.optim` | paged_adamw_32bit |" in readme
    assert "2 runs, selected by the highest Agg_MU" in readme
    assert "Selected: `ROSU_rho0.4`" in readme
    assert "  - `trainer.method_args.rho`: 0.2, 0.4" in readme
    assert "`task_name`" not in readme
    assert "2 × L40S. 125 optimizer steps in 82 s of training." in readme
    assert f"launched with `{launcher}`" in readme
    assert "forget_quality 0.02, model_utility 0.6" in readme
    assert "| ROSU_rho0.4 |" in readme
    assert "**TODO:** address of the paper" in readme

    assert os.access(out / "run.sh", os.X_OK)
    subprocess.run(["bash", "-n", str(out / "run.sh")], check=True)
    assert f"pip install rosu-llm=={__version__}" in script
    assert script.index("# Retain\n# TODO: the command of the evaluation is not recorded") < script.index("# Initial\n")
    tuning, best = script.split(" Final best parameters ")
    assert "trainer.method_args.rho=0.2" in tuning
    assert "TODO: the launcher is not recorded" in tuning
    assert "trainer.method_args.rho=0.4" not in tuning
    words = [line.strip(" \\") for line in best.splitlines()]
    assert f"{launcher} src/train.py" in words
    assert words[words.index(f"{launcher} src/train.py") + 1] == "--config-name=unlearn.yaml"
    assert "trainer.method_args.rho=0.4" in words
    assert "python src/eval.py" in words
    assert "'+eval/tofu_metrics=[rosu_summary]'" in words
    assert "GradDiff" not in script


def test_a_contribution_invents_nothing(tmp_path: Path) -> None:
    write_eval(tmp_path / "unlearn" / "mine" / "evals", FIGURES)
    out = tmp_path / "kit"
    assert main(["table", str(tmp_path / "unlearn"), "--contribution", str(out), "--name", "Mine"]) == 0
    readme, script = (out / "README.md").read_text(), (out / "run.sh").read_text()
    for words in (
        "title of the paper",
        "authors",
        "no .hydra/config.yaml",
        "ranges",
        "type and number of GPUs",
        "launcher",
    ):
        assert any(words in line and "**TODO:**" in line for line in readme.splitlines()), words
    assert "ROSU" not in readme.split("# Results")[0]
    assert "rosu-llm" not in script
    assert "# TODO: the command of the training is not recorded" in script
    subprocess.run(["bash", str(out / "run.sh")], check=True)  # nothing in it but comments


def test_a_contribution_is_not_overwritten_and_needs_a_method_of_the_runs(
    saves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kit"
    call = [str(saves / "unlearn"), "--contribution", str(out), "--name"]
    assert "--name 'NPO' is none of the methods of these runs (GradDiff, ROSU)" in refusal([*call, "NPO"], capsys)
    out.mkdir()
    (out / "run.sh").write_text("mine")
    assert "run.sh exist already" in refusal([*call, "ROSU"], capsys)
    assert [path.name for path in out.iterdir()] == ["run.sh"]
    assert (out / "run.sh").read_text() == "mine"


def test_local_paths_in_a_contribution_are_pointed_out(saves: Path, tmp_path: Path) -> None:
    run = saves / "unlearn" / f"tofu_{MODEL}_forget10_ROSU_rho0.4"
    record = run / ".hydra" / "overrides.yaml"
    record.write_text(record.read_text() + "- model.model_args.pretrained_model_name_or_path=/scratch/me/model\n")
    out = tmp_path / "kit"
    assert main(["table", str(run), "--contribution", str(out), "--name", "ROSU"]) == 0
    assert "# TODO: replace the local path in model.model_args" in (out / "run.sh").read_text()


def test_references_are_found_where_openunlearning_keeps_them(saves: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same table with and without naming them; a retain model of another split is not taken."""
    assert main(["table", str(saves / "unlearn"), *references(saves)]) == 0
    named = capsys.readouterr()
    write_eval(saves / "eval" / f"tofu_{MODEL}_retain99", INITIAL)
    assert main(["table", str(saves / "unlearn")]) == 0
    found = capsys.readouterr()
    assert found.out == named.out
    assert "found beside the runs" in found.err and "found beside" not in named.err


def test_an_evaluation_is_found_where_src_eval_writes_by_default(
    saves: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``src/eval.py`` without an output folder writes to saves/eval/RUN; what it asked for is not asked for again."""
    run = make_run(saves, 0.3, FIGURES)
    partial = {"extraction_strength": 0.5, "model_utility": 0.6, "forget_Q_A_Prob": 0.2}
    write_eval(run / "checkpoint-5" / "evals", partial)
    elsewhere = saves / "eval" / run.name
    (run / "evals").rename(elsewhere)
    assert main(["table", str(saves / "unlearn"), "--format", "json"]) == 0
    content = json.loads(capsys.readouterr().out)
    (row,) = (row for row in content["rows"] if row["method"] == "ROSU_rho0.3")
    assert row["source"] == str(elsewhere / "TOFU_EVAL.json")
    assert row["Mem"] == pytest.approx(1 / 3)

    (elsewhere / "TOFU_EVAL.json").unlink()  # asked for everything, stopped on the way
    write_hydra(elsewhere, {"eval": {"tofu": {"metrics": {"Mem": {}}}}}, [], choices={"model": MODEL})
    write_eval(elsewhere, partial)
    assert main(["table", str(run)]) == 0
    out = capsys.readouterr().out
    assert "its evaluation did not get that far, so start it again" in out
    assert "rosu_summary" not in out


def variant(saves: Path, name: str, trainer: str, **more: Any) -> Path:
    """A run of ``trainer`` with other records of data, experiment and method."""
    run = make_run(saves, 0.4, more.pop("figures", FIGURES), trainer=name)
    handler, experiment = more.pop("handler", "QADataset"), more.pop("experiment", "unlearn/tofu/default")
    arguments = {"return_original": more.pop("return_original", True)}
    config = {
        "forget_split": "forget10",
        "data": {"forget": {"TOFU_QA_forget": {"handler": handler, "args": arguments}}},
        "trainer": {"handler": trainer, "method_args": more},
    }
    write_hydra(run, config, [], choices={"model": MODEL, "trainer": trainer, "experiment": experiment})
    return run


def test_different_methods_of_one_trainer_are_not_merged(saves: Path, capsys: pytest.CaptureFixture[str]) -> None:
    idk, recommended = "unlearn/tofu/idk", "unlearn/tofu/rosu_recommended"
    variant(saves, "a", "DPO", handler="QAwithIdkDataset", experiment=idk)
    variant(saves, "b", "DPO", handler="QAwithAlternateDataset")
    variant(saves, "c", "GradDiff", handler="QAwithIdkDataset", experiment=idk, return_original=False)
    variant(saves, "d", "ROSU", handler="QAwithIdkDataset", experiment=idk, method="rosu", forget_loss="IdkDPO")
    variant(saves, "e", "ROSU", experiment=recommended, calibrate="off", forget_until="holdout")
    variant(saves, "f", "ROSU_matched", calibrate="off", forget_until="off")
    variant(saves, "g", "ROSU", method="uam", forget_loss="nll", calibrate=2.5)
    partial = {"extraction_strength": 0.5, "model_utility": 0.6, "forget_Q_A_Prob": 0.2}
    variant(saves, "h", "NPO", figures=partial)
    variant(saves, "i", "SimNPO", experiment="unlearn/tofu/mine")
    variant(saves, "j", "SimNPO")
    assert main(["table", str(saves / "unlearn"), "--best", "--format", "json"]) == 0
    content = json.loads(capsys.readouterr().out)
    rows = {row["method"]: row for row in content["rows"] if not row["reference"]}
    assert list(rows) == [
        "GradDiff",
        "ROSU",
        "IdkDPO",
        "AltPO",
        "IdkNLL",
        "ROSU (with idk, IdkDPO)",
        "ROSU (bounded by held-out data)",
        "ROSU_matched",
        "ROSU (method=uam, calibrated to a loss of 2.5)",
        "NPO",
        "SimNPO [unlearn/tofu/mine]",
        "SimNPO [unlearn/tofu/default]",
    ]
    assert rows["NPO"]["Agg_MU"] is None and rows["ROSU"]["Agg_MU"] is not None
    notes = " ".join(content["notes"])
    assert "as none has Agg_MU: NPO." in notes
    assert "Priv counts questions as unseen that the training looked at, in: e_rho0.4 (bounded" in notes
    assert main(["table", str(saves / "unlearn"), "--format", "json"]) == 0
    assert "e_rho0.4 (bounded by held-out data)" in runs_shown(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("source", "aside", "again"),
    [
        ("data/tofu/holdout10/train.json", 20, True),
        ("locuslab/TOFU:holdout10:train[-20:]", 20, True),
        ("locuslab/TOFU:holdout10:train[:5%]", None, True),
        ("data/holdout100.json", None, False),
        ("locuslab/TOFU:holdout10", None, True),
        ("locuslab/TOFU:holdout10", 20, True),
        ("locuslab/TOFU:holdout10[:20]", 20, False),
        ("locuslab/TOFU:holdout10[:30]", 20, True),
        ("data/tofu/holdout10.json", None, True),
        ("locuslab/TOFU:holdout10:train[20:40]", 40, False),
        ("locuslab/TOFU:holdout05", 20, True),
        ("locuslab/TOFU:holdout01", 40, False),
        ("mine:level", None, False),
    ],
)
def test_runs_of_our_own_say_how_they_knew_when_to_stop(
    source: str, aside: int | None, again: bool, saves: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(saves, 0.3, FIGURES)
    (run / ".hydra" / "config.yaml").unlink()
    settings = {"calibrate": 2.5, "forget_until": "holdout", "holdout_data": source}
    (run / "rosu_run.json").write_text(json.dumps({"settings": settings}))
    (run / "evals" / "rosu_eval.json").write_text(json.dumps({"conditions": {"held_out_questions": aside}}))
    assert main(["table", str(saves / "unlearn"), "--format", "json"]) == 0
    content = json.loads(capsys.readouterr().out)
    label = "ROSU_rho0.3 (calibrated to a loss of 2.5, bounded by held-out data)"
    assert label in [row["method"] for row in content["rows"]]
    assert any(f"in: {label}" in note for note in content["notes"]) == again
    assert main(["table", str(saves / "unlearn"), "--best", "--format", "json"]) == 0
    depth = "(calibrated to a loss of 2.5, bounded by held-out data)"
    assert f"ROSU {depth}" in [row["method"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert main(["report", str(run), "--out", str(saves / "page")]) == 0
    assert depth in (saves / "page" / "report.html").read_text()


def test_a_limit_counts_among_the_questions_that_training_looked_at(saves: Path) -> None:
    run = make_run(saves, 0.3, FIGURES)
    (run / ".hydra" / "config.yaml").unlink()
    settings = {"forget_until": "holdout", "holdout_data": "locuslab/TOFU:holdout10", "limit": 20}
    for aside, again in ((None, True), (19, True), (20, False)):
        (run / "rosu_run.json").write_text(json.dumps({"settings": settings}))
        (run / "evals" / "rosu_eval.json").write_text(json.dumps({"conditions": {"held_out_questions": aside}}))
        assert read_result(run / "evals" / "TOFU_EVAL.json").reuses_non_members == again


@pytest.mark.parametrize("asked", [20, 40, 60])
def test_openunlearnings_runs_say_how_many_questions_training_looked_at(saves: Path, asked: int) -> None:
    run = make_run(saves, 0.3, FIGURES)
    (run / "evals" / ".hydra").mkdir(parents=True, exist_ok=True)
    method = {"forget_until": "holdout", "holdout_data": {"TOFU_QA_holdout": {}}}
    for folder, count in ((run, 40), (run / "evals", asked)):
        config = {"trainer": {"method_args": method}, "eval": {"tofu": {"held_out_questions": count}}}
        (folder / ".hydra" / "config.yaml").write_text(json.dumps(config))
    assert read_result(run / "evals" / "TOFU_EVAL.json").reuses_non_members == (asked < 40)


def test_what_a_result_says_of_a_model_that_lies_elsewhere_or_nowhere(saves: Path) -> None:
    made = {"settings": {"forget_until": "holdout", "holdout_data": "locuslab/TOFU:holdout10"}}
    run, evals = saves / "mine", write_eval(saves / "elsewhere", FIGURES).parent
    (run / "checkpoint-5").mkdir(parents=True)
    (run / "rosu_run.json").write_text(json.dumps(made))
    plain = saves / "plain"
    plain.mkdir()
    for sidecar, depth in (
        ({"name": str(plain)}, None),
        ({"name": str(run)}, "bounded by held-out data"),
        ({"name": str(run / "checkpoint-5")}, "bounded by held-out data"),
        ({"name": str(run), "training": {"forget_until": "off"}}, None),  # began with that model
        ({"name": str(plain), "training": made["settings"]}, "bounded by held-out data"),
    ):
        (evals / "rosu_eval.json").write_text(json.dumps(sidecar))
        result = read_result(evals / "TOFU_EVAL.json")
        assert result.depth == depth and result.reuses_non_members == (depth is not None)


def attacked(folder: Path, counts: Sequence[int], figures: dict[str, Any] = FIGURES) -> None:
    """Results whose attacks had these numbers of non-members."""
    path = write_eval(folder, figures)
    content = json.loads(path.read_text())
    for name, count in zip(ATTACKS.values(), counts, strict=True):
        content[name]["holdout"] = {"value_by_index": {str(at): {"score": 0.0} for at in range(count)}}
    path.write_text(json.dumps(content))


def test_privacy_needs_the_same_non_members(saves: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calibration questions set aside in one attack only, in the run only, or in both: the last is a figure."""
    evals = saves / "unlearn" / f"tofu_{MODEL}_forget10_ROSU_rho0.4" / "evals"
    retain = saves / "eval" / f"tofu_{MODEL}_retain90"
    attacked(retain, (28, 28, 28, 28), RETAIN)

    def priv() -> tuple[float | None, str]:
        assert main(["table", str(evals.parent), "--format", "json"]) == 0
        row = json.loads(capsys.readouterr().out)["rows"][-1]
        return row["Priv"], str(row.get("missing", {}).get("Priv"))

    attacked(evals, (28, 28, 8, 28))
    value, why = priv()
    assert value is None and "of attacks on 8 and 28 non-members" in why
    attacked(evals, (8, 8, 8, 8))
    value, why = priv()
    assert value is None and "the retain model's on 28" in why
    attacked(retain / "evals_forget10_recommended", (8, 8, 8, 8), RETAIN)
    assert priv()[0] == pytest.approx(2 / 3)


def test_privacy_needs_as_many_questions_left_out_where_nothing_is_counted(
    saves: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, retain = saves / "runs" / "one", saves / "runs" / "retain"
    for folder, figures in ((run, FIGURES), (retain, RETAIN)):
        write_summary(folder / "evals", figures)

    def priv(ours: int | None, theirs: int | None) -> tuple[float | None, str]:
        for folder, aside in ((run, ours), (retain, theirs)):
            text = json.dumps({"conditions": {"forget_split": "forget10", "held_out_questions": aside}})
            (folder / "evals" / "rosu_eval.json").write_text(text)
        assert main(["table", str(run), "--retain", str(retain), "--format", "json"]) == 0
        row = json.loads(capsys.readouterr().out)["rows"][-1]
        return row["Priv"], str(row.get("missing", {}).get("Priv"))

    assert priv(20, 20)[0] == priv(None, None)[0] == pytest.approx(2 / 3)
    value, why = priv(20, None)
    assert value is None and "left 20 held-out questions out, the retain model's 0" in why


def test_results_of_another_benchmark_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evals = tmp_path / "saves" / "unlearn" / "muse" / "evals"
    evals.mkdir(parents=True)
    (evals / "MUSE_EVAL.json").write_text("{}")
    assert "holds results of MUSE" in refusal([str(tmp_path / "saves")], capsys)


def test_a_multirun_has_its_records_elsewhere(saves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hydra writes them below multirun; the folder that a job wrote to is in them, by references."""
    run = make_run(saves, 0.3, FIGURES)
    config = yaml.safe_load((run / ".hydra" / "config.yaml").read_text())
    config |= {"mode": "unlearn", "task_name": "tofu_Llama-3.2-1B-Instruct_forget10_${trainer.handler}_rho0.3"}
    config["paths"] = {"root_dir": ".", "output_dir": "${paths.root_dir}/saves/${mode}/${task_name}"}
    config["trainer"]["args"]["output_dir"] = "${paths.output_dir}"
    job = tmp_path / "multirun" / "2026-01-02" / "03-04-05" / "1"
    write_hydra(job, config, ["trainer=ROSU"], choices={"model": MODEL, "trainer": "ROSU"})
    shutil.rmtree(run / ".hydra")
    out = tmp_path / "kit"
    assert main(["table", str(run), "--contribution", str(out), "--name", "ROSU"]) == 0
    assert "| `trainer.method_args.rho` | 0.3 |" in (out / "README.md").read_text()
    assert "trainer=ROSU" in (out / "run.sh").read_text()
