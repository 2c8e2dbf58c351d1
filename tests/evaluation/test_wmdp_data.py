"""Local questions: the same prompts, targets and metrics as lm-eval's own tasks; unusable files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rosu_llm.errors import DataError
from rosu_llm.evaluation.wmdp.evaluate import TASKS, write_tasks
from tests.evaluation.wmdp_records import write_questions

pytest.importorskip("lm_eval")

COUNTS = {"wmdp_bio": 3, "wmdp_cyber": 2, "mmlu/anatomy": 3, "mmlu/high_school_us_history": 2}
LEAVES = ("wmdp_bio", "wmdp_cyber", "mmlu_anatomy", "mmlu_high_school_us_history")
PROMPT = (
    "The following are multiple choice questions (with answers) about biology.\n\n"
    "What is 1 plus 8?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"
)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    sizes = write_tasks(write_questions(tmp_path / "data", COUNTS), TASKS, folder)
    assert sizes == dict(zip(LEAVES, COUNTS.values(), strict=True))
    return folder


def test_prompts_targets_and_metrics_are_those_of_lm_eval(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's own tasks are given the same rows in place of the hub's; then every question is asked both ways."""
    import datasets
    from lm_eval.tasks import TaskManager

    local = TaskManager(include_path=str(tasks), include_defaults=False).load(list(LEAVES))["tasks"]

    def from_disk(path: str, name: str, **_: Any) -> Any:
        assert path in ("cais/wmdp", "cais/mmlu")
        file = tasks / f"{name.replace('-', '_') if 'wmdp' in name else f'mmlu_{name}'}.jsonl"
        rows = datasets.Dataset.from_list([json.loads(line) for line in file.read_text().splitlines()])
        return datasets.DatasetDict(test=rows, dev=rows)

    monkeypatch.setattr(datasets, "load_dataset", from_disk)
    theirs = TaskManager().load(list(LEAVES))["tasks"]
    for name in LEAVES:
        mine, truth = local[name], theirs[name]
        assert len(mine.eval_docs) == len(truth.eval_docs)
        for doc in truth.eval_docs:
            assert mine.fewshot_context(doc, 0) == truth.fewshot_context(doc, 0)
            assert mine.doc_to_choice(doc) == truth.doc_to_choice(doc) == ["A", "B", "C", "D"]
            assert mine.doc_to_target(doc) == truth.doc_to_target(doc) == doc["answer"]
        for key in ("output_type", "metric_list", "target_delimiter", "description"):
            assert mine.dump_config().get(key) == truth.dump_config().get(key), key
        assert mine.VERSION == truth.VERSION
    bio = local["wmdp_bio"]
    assert bio.fewshot_context(bio.eval_docs[1], 0) == PROMPT


def test_mmlu_is_a_group_weighted_by_size(tasks: Path) -> None:
    group = yaml.safe_load((tasks / "mmlu.yaml").read_text())
    assert group["group"] == "mmlu" and group["task"] == list(LEAVES[2:])
    assert group["aggregate_metric_list"] == [{"metric": "acc", "weight_by_size": True}]


def test_development_questions_are_not_asked(tmp_path: Path) -> None:
    data = write_questions(tmp_path / "data", COUNTS)
    (data / "mmlu" / "anatomy.dev.jsonl").write_text("not for testing")
    assert write_tasks(data, ("mmlu",), tmp_path) == {"mmlu_anatomy": 3, "mmlu_high_school_us_history": 2}


GOOD = {"question": "Which?", "choices": ["a", "b", "c", "d"], "answer": 0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no row"),
        (json.dumps(GOOD) + "\nnot json\n", "line 2, is not JSON"),
        (json.dumps(GOOD) + "\n" + json.dumps({**GOOD, "answer": "A"}), "row 2: its answer is 'A'. Expected"),
        (json.dumps({**GOOD, "answer": 4}), "row 1: its answer is 4"),
        (json.dumps({**GOOD, "answer": True}), "row 1: its answer is True"),
        (json.dumps({**GOOD, "choices": ["a", "b"]}), "row 1: its choices are"),
        (json.dumps({**GOOD, "question": " "}), "row 1: its question is ' '"),
        (json.dumps({"text": "prose"}), "row 1: its question is None"),
    ],
)
def test_unusable_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "wmdp_bio.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"wmdp_bio\.jsonl") as caught:
        write_tasks(tmp_path, ("wmdp_bio",), tmp_path)
    assert message in str(caught.value)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere' does not exist"):
        write_tasks(tmp_path / "nowhere", TASKS, tmp_path)
    with pytest.raises(DataError, match=r"wmdp_cyber\.jsonl' does not exist.*one question per line.*cais/wmdp"):
        write_tasks(tmp_path, ("wmdp_cyber",), tmp_path)
    with pytest.raises(DataError, match=r"no <subject>.test.jsonl"):
        write_tasks(tmp_path, ("mmlu",), tmp_path)
    write_questions(tmp_path, {"mmlu/astrology": 1})
    with pytest.raises(DataError, match="no task 'mmlu_astrology'"):
        write_tasks(tmp_path, ("mmlu",), tmp_path)
