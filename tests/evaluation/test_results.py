"""Reading what OpenUnlearning writes: both forms, where a file belongs, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.errors import DataError
from rosu_llm.evaluation.provenance import read_hydra, read_record
from rosu_llm.evaluation.tofu.collection import (
    check_comparable,
    find_reference,
    find_results,
    unique_labels,
    with_non_members_of,
    without,
)
from rosu_llm.evaluation.tofu.results import read_result
from rosu_llm.evaluation.tofu.summary import ATTACKS
from rosu_llm.presentation.tofu import tofu_table
from tests.evaluation.saves import FIGURES, make_run, write_eval, write_hydra, write_summary

MODEL = "Llama-3.2-1B-Instruct"


def test_both_forms_give_the_same_figures(tmp_path: Path) -> None:
    per_question = read_result(write_eval(tmp_path / "a", FIGURES))
    means = read_result(write_summary(tmp_path / "b", FIGURES))
    assert per_question.figures == means.figures == FIGURES
    assert (per_question.questions, means.questions) == (4, None)


def test_null_and_nan_are_told_apart_from_absent(tmp_path: Path) -> None:
    values: dict[str, Any] = {**FIGURES, "model_utility": None, "mia_loss": float("nan"), "mia_zlib": float("inf")}
    del values["mia_min_k"]
    result = read_result(write_eval(tmp_path, values))
    infinite = "not finite in the file"
    assert result.unusable == {"model_utility": "null in the file", "mia_loss": infinite, "mia_zlib": infinite}
    assert not {"model_utility", "mia_loss", "mia_zlib", "mia_min_k"} & result.figures.keys()


def test_rounding_just_outside_the_range_is_accepted_more_is_not(tmp_path: Path) -> None:
    assert read_result(write_eval(tmp_path, {**FIGURES, "mia_loss": 1 + 1e-9})).figures["mia_loss"] == 1
    assert read_result(write_eval(tmp_path, {**FIGURES, "mia_loss": -1e-9})).figures["mia_loss"] == 0
    for bad, words in ((1.01, r"mia_loss is 1\.01, outside \[0, 1\]"), (True, "not a number"), ("0.5", "not a number")):
        with pytest.raises(DataError, match=words):
            read_result(write_eval(tmp_path, {**FIGURES, "mia_loss": bad}))


def test_the_truth_ratio_is_formed_from_losses_when_it_was_not_measured(tmp_path: Path) -> None:
    """True answers 1/2 and 1/4; false ones exp(−mean loss) = 1/6 and 1/4: shares 3/4 and 1/2."""
    content = {
        "forget_Q_A_PARA_Prob": {
            "agg_value": 0.375,
            "value_by_index": {"7": {"avg_loss": log(2)}, "9": {"avg_loss": log(4)}},
        },
        "forget_Q_A_PERT_Prob": {
            "agg_value": 0.2,
            "value_by_index": {"9": {"avg_loss": [log(2), log(8)]}, "7": {"avg_loss": [log(4), log(9)]}},
        },
        "forget_truth_ratio": {"agg_value": 0.9},
    }
    path = tmp_path / "TOFU_EVAL.json"
    path.write_text(json.dumps(content))
    result = read_result(path)
    assert result.derived_truth_ratio
    assert result.figures["forget_truth_ratio_prob_mean"] == pytest.approx(5 / 8, abs=1e-9)
    assert result.questions == 2

    content["forget_truth_ratio_prob_mean"] = {"agg_value": 0.25}
    path.write_text(json.dumps(content))
    measured = read_result(path)
    assert measured.figures["forget_truth_ratio_prob_mean"] == 0.25
    assert not measured.derived_truth_ratio

    del content["forget_truth_ratio_prob_mean"], content["forget_Q_A_PERT_Prob"]["value_by_index"]["9"]  # type: ignore[attr-defined]
    path.write_text(json.dumps(content))
    assert "forget_truth_ratio_prob_mean" not in read_result(path).figures


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not whole JSON"),
        ('{"forget_Q_A_Prob": {"agg_val', "not whole JSON"),
        ("[1, 2]", "not a result of OpenUnlearning's TOFU evaluation"),
        ("{}", "not a result"),
        ('{"loss": 1.0}', "not a result"),
        ('{"forget_knowmem_ROUGE": 0.3, "privleak": -99.8, "extraction_strength": 0.1}', "not a result"),
    ],
)
def test_other_files_are_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "TOFU_EVAL.json"
    path.write_text(text)
    with pytest.raises(DataError, match=words) as caught:
        read_result(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_where_a_result_belongs(tmp_path: Path) -> None:
    run = make_run(tmp_path, 0.4, FIGURES)
    result = read_result(run / "evals" / "TOFU_EVAL.json")
    assert result.run == run
    assert (result.split, result.model, result.trainer, result.label) == ("forget10", MODEL, "ROSU", "ROSU_rho0.4")
    assert result.checkpoint is None

    step = read_result(write_eval(run / "checkpoint-30" / "evals", FIGURES))
    assert (step.run, step.checkpoint, step.label) == (run, 30, "ROSU_rho0.4/checkpoint-30")
    assert step.split == "forget10"


@pytest.mark.parametrize(
    ("folder", "split", "model"),
    [
        (f"eval/tofu_{MODEL}_retain90", "forget10", MODEL),
        (f"eval/tofu_{MODEL}_retain99", "forget01", MODEL),
        (f"eval/tofu_{MODEL}_full/evals_forget05", "forget05", MODEL),
        ("unlearn/tofu_Llama-2-7b-chat-hf_forget01_NPO/evals", "forget01", "Llama-2-7b-chat-hf"),
        ("unlearn/mine/evals", None, None),
    ],
)
def test_split_and_model_from_the_names_openunlearning_gives(
    folder: str, split: str | None, model: str | None, tmp_path: Path
) -> None:
    result = read_result(write_eval(tmp_path / "forget99_study" / folder, FIGURES))
    assert (result.split, result.model) == (split, model)


def test_records_win_over_names(tmp_path: Path) -> None:
    folder = tmp_path / "unlearn" / "tofu_A_forget01_X" / "evals"
    write_hydra(folder, {"eval": {"tofu": {"forget_split": "forget05"}}}, [], choices={"model": "B"})
    result = read_result(write_eval(folder, FIGURES))
    assert (result.split, result.model) == ("forget05", "B")


def test_of_a_run_the_final_evaluation_is_taken_else_its_last_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "unlearn" / "run"
    for step in (0, 5, 10):
        write_eval(run / f"checkpoint-{step}" / "evals", FIGURES)
    assert find_results(tmp_path) == [run / "checkpoint-10" / "evals" / "TOFU_EVAL.json"]
    write_summary(run / "evals", FIGURES)
    assert find_results(run) == [run / "evals" / "TOFU_SUMMARY.json"]
    write_eval(run / "evals", FIGURES)
    assert find_results(run) == [run / "evals" / "TOFU_EVAL.json"]
    steps = [read_result(path).checkpoint for path in find_results(run, every_checkpoint=True)]
    assert steps == [0, 5, 10, None]


def test_absent_and_empty_places(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        find_results(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no TOFU_EVAL.json or TOFU_SUMMARY.json"):
        find_results(tmp_path)


def test_a_reference_with_several_splits(tmp_path: Path) -> None:
    full = tmp_path / f"tofu_{MODEL}_full"
    for split in ("forget01", "forget10"):
        write_eval(full / f"evals_{split}", FIGURES)
    assert find_reference(full, "forget10", without(None)).parent.name == "evals_forget10"
    with pytest.raises(DataError, match="holds 2 results, and none of them fit forget05: name one"):
        find_reference(full, "forget05", without(None))


def test_a_reference_with_several_choices_of_questions(tmp_path: Path) -> None:
    """By what was left out, or by what the attacks had, whichever is known of both sides."""
    retain = tmp_path / f"tofu_{MODEL}_retain90"
    for name, count in (("evals_forget10", 28), ("evals_forget10_heldout20", 8), ("evals_forget10_too", 28)):
        path = write_eval(retain / name, FIGURES)
        content = json.loads(path.read_text())
        for attack in ATTACKS.values():
            content[attack]["holdout"] = {"value_by_index": {str(at): {"score": 0.0} for at in range(count)}}
        path.write_text(json.dumps(content))
        conditions = {"forget_split": "forget10", "held_out_questions": 20 if "heldout" in name else None}
        (path.parent / "rosu_eval.json").write_text(json.dumps({"conditions": conditions}))
    run = read_result(retain / "evals_forget10_heldout20" / "TOFU_EVAL.json")
    for fits in (without(20), with_non_members_of([run]), with_non_members_of([replace(run, non_members={})])):
        assert find_reference(retain, "forget10", fits) == run.path
    with pytest.raises(DataError, match=r"holds 3 results, and 2 of them fit forget10: name one, such as .*10/"):
        find_reference(retain, "forget10", without(None))


def test_splits_models_and_sizes_must_not_be_mixed(tmp_path: Path) -> None:
    def results(*folders: Path) -> list[Any]:
        return [read_result(path) for folder in folders for path in find_results(folder)]

    one, two = make_run(tmp_path, 0.2, FIGURES), make_run(tmp_path, 0.4, FIGURES)
    check_comparable(results(one, two))
    other = make_run(tmp_path, 0.4, FIGURES, split="forget01")
    with pytest.raises(
        DataError, match=r"forget split is forget10 in .*rho0.2.* and 1 more, but forget01 in .*forget01"
    ):
        check_comparable(results(one, two, other))
    larger = make_run(tmp_path, 0.4, FIGURES, model="Llama-3.2-3B-Instruct")
    with pytest.raises(DataError, match=r"the model is Llama-3.2-1B-Instruct in .*but Llama-3.2-3B-Instruct in"):
        check_comparable(results(one, larger))
    write_eval(two / "evals", FIGURES, questions=5)
    with pytest.raises(DataError, match=r"number of forget questions is 4 in .*but 5 in"):
        check_comparable(results(one, two))


def test_unknown_identities_do_not_clash_with_known_ones(tmp_path: Path) -> None:
    unnamed = write_eval(tmp_path / "mine", FIGURES)
    check_comparable([read_result(unnamed), *map(read_result, find_results(make_run(tmp_path, 0.2, FIGURES)))])


def test_models_without_a_name_are_told_apart_by_kind_and_size(tmp_path: Path) -> None:
    """A chat format of one's own gives no name of OpenUnlearning's; what was measured is known all the same."""

    def result(name: str, architecture: str | None) -> Any:
        path = write_eval(tmp_path / name, FIGURES)
        record = {
            "schema": "rosu/tofu-eval/1",
            "architecture": architecture,
            "conditions": {"forget_split": "forget01"},
        }
        path.with_name("rosu_eval.json").write_text(json.dumps(record))
        return read_result(path)

    small, other, large = (result(name, f"llama with {n} parameters") for name, n in (("a", 5), ("b", 5), ("c", 7)))
    check_comparable([small, other])
    notes = tofu_table([small, other]).table.notes
    assert notes[0].startswith("TOFU forget01, llama with 5 parameters;")
    assert not any("not checked" in note for note in notes)
    with pytest.raises(DataError, match=r"architecture is llama with 5 parameters in .*but llama with 7 parameters in"):
        check_comparable([small, other, large])
    older = result("d", None)
    assert any(
        f"not checked, in: {small.path}, {older.path}" in note for note in tofu_table([small, older]).table.notes
    )


def test_labels_are_unique(tmp_path: Path) -> None:
    paths = [
        write_eval(tmp_path / place, FIGURES)
        for place in ("a/x/evals", "b/x/evals", "a/y/evals", "a/x/evals_2", "c/b/x/evals")
    ]
    labels = unique_labels(map(read_result, paths))
    assert labels == ["a/x (1)", "b/x (1)", "y", "a/x (2)", "b/x (2)"]


def test_references_inside_a_record_are_followed(tmp_path: Path) -> None:
    config = {"a": {"b": "${c}"}, "c": "${d.e}", "d": {"e": 5}, "x": "${y}", "y": "${x}", "z": "${now:%Y}", "t": "s"}
    write_hydra(tmp_path, config, [], choices={})
    job = read_hydra(tmp_path)
    assert [job.get(path) for path in ("a.b", "x", "z", "t", "d.nothing", "t.u")] == [5, None, None, "s", None, None]


def test_records_that_cannot_be_read(tmp_path: Path) -> None:
    assert read_hydra(tmp_path).overrides == ()
    assert read_hydra(tmp_path).get("a.b") is None
    assert read_record(tmp_path / "trainer_state.json") == {}
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("a: [1")
    with pytest.raises(DataError, match=r"config.yaml is not YAML"):
        read_hydra(tmp_path)
    (tmp_path / ".hydra" / "config.yaml").write_text("a: !!python/object/apply:os.getcwd []")
    with pytest.raises(DataError, match=r"config.yaml is not YAML"):
        read_hydra(tmp_path)
    (tmp_path / "trainer_state.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        read_record(tmp_path / "trainer_state.json")
