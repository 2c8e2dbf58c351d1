"""WMDP and MMLU from local files: lm-eval's own task definitions, pointed at a folder instead of the hub.

The folder holds ``wmdp_bio.jsonl``, ``wmdp_cyber.jsonl`` and ``mmlu/SUBJECT.test.jsonl`` (or ``mmlu/SUBJECT.jsonl``),
one question per line: ``{"question": str, "choices": [4 × str], "answer": 0…3}``. Every definition is the one that
ships with the installed lm-eval, with only the data's address replaced, so prompts and metrics cannot drift from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ...data.sources import read_rows
from ...errors import DataError

TASKS = ("wmdp_bio", "wmdp_cyber", "mmlu")
SUBJECTS = 57
EXPECTED = '{"question": text, "choices": [4 texts], "answer": 0, 1, 2 or 3}'
HOW_TO_OBTAIN = "The questions are on the hub as cais/wmdp and cais/mmlu."


def write_tasks(data: Path, tasks: tuple[str, ...], folder: Path) -> dict[str, int]:
    """Write lm-eval definitions of ``tasks`` over the files in ``data`` to ``folder``; returns questions per leaf task.

    The checked rows are copied and read through a private cache: the shared one serves stale rows of edited files.
    """
    if not data.is_dir():
        raise DataError(f"The data folder {str(data)!r} does not exist.")
    sizes: dict[str, int] = {}
    for task in tasks:
        if task == "mmlu":
            sizes |= _write_mmlu(data / "mmlu", folder)
        else:
            sizes[task] = _write_leaf(task, _builtin("wmdp", f"{task}.yaml"), data / f"{task}.jsonl", folder)
    return sizes


def _write_mmlu(data: Path, folder: Path) -> dict[str, int]:
    files = {path.name.split(".")[0]: path for path in data.glob("*.jsonl") if not path.name.endswith(".dev.jsonl")}
    if not files:
        raise DataError(f"{str(data)!r} holds no <subject>.test.jsonl file for the task mmlu. {HOW_TO_OBTAIN}")
    sizes = {}
    for subject, path in sorted(files.items()):
        definition = _builtin("mmlu", "default", f"mmlu_{subject}.yaml")
        sizes[f"mmlu_{subject}"] = _write_leaf(f"mmlu_{subject}", definition, path, folder)
    group = {**_builtin("mmlu", "default", "_mmlu.yaml"), "task": list(sizes)}
    _dump(folder / "mmlu.yaml", group)
    return sizes


def _write_leaf(task: str, definition: Mapping[str, Any], source: Path, folder: Path) -> int:
    if not source.is_file():
        raise DataError(
            f"{str(source)!r} does not exist; the task {task} needs it, one question per line: {EXPECTED}. "
            f"{HOW_TO_OBTAIN}"
        )
    rows = [_checked(row, source, number) for number, row in enumerate(read_rows(str(source)), 1)]
    copy = folder / f"{task}.jsonl"
    copy.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    local = {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(copy)}, "cache_dir": str(folder / "cache")},
        "fewshot_split": None,
        "tag": None,
    }
    _dump(folder / f"{task}.yaml", {key: value for key, value in {**definition, **local}.items() if value is not None})
    return len(rows)


def _checked(row: Mapping[str, Any], source: Path, number: int) -> dict[str, Any]:
    question, choices, answer = (row.get(key) for key in ("question", "choices", "answer"))
    wrong = ""
    if not isinstance(question, str) or not question.strip():
        wrong = f"its question is {question!r}"
    elif not (isinstance(choices, list) and len(choices) == 4 and all(isinstance(choice, str) for choice in choices)):
        wrong = f"its choices are {choices!r}"
    elif type(answer) is not int or answer not in range(4):
        wrong = f"its answer is {answer!r}"
    if wrong:
        raise DataError(f"{source}, row {number}: {wrong}. Expected {EXPECTED}.")
    return {"question": question, "choices": choices, "answer": answer}


def _builtin(*parts: str) -> dict[str, Any]:
    """A definition of the installed lm-eval, with its ``include`` merged in."""
    import lm_eval

    path = Path(lm_eval.__file__).parent / "tasks" / Path(*parts)
    if not path.is_file():
        raise DataError(
            f"lm-eval {lm_eval.__version__} has no task {path.stem!r}: rename the data file to a subject of MMLU."
        )
    definition: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    include = definition.pop("include", None)
    if include is None:
        return definition
    return {**yaml.safe_load((path.parent / include).read_text(encoding="utf-8")), **definition}


def _dump(path: Path, definition: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(dict(definition), sort_keys=False, allow_unicode=True), encoding="utf-8")
