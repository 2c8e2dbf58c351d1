"""One model through lm-eval: multiple-choice tasks, 0-shot, the questions divided among the processes.

Questions may come from a folder instead of the hub: ``wmdp_bio.jsonl``, ``wmdp_cyber.jsonl`` and
``mmlu/SUBJECT.test.jsonl`` (or ``mmlu/SUBJECT.jsonl``), one question per line as ``EXPECTED`` says. Every definition is
the one that ships with the installed lm-eval, with only the data's address replaced, so prompts and metrics cannot
drift from it.

The result keeps for every question whether the answer was right, so that two models can be compared question by
question, and for every task a hash of its prompts and targets, so that results on other questions are recognised.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from ...compat import accelerator_kind, installed_versions
from ...data.sources import read_rows
from ...errors import ConfigError, DataError
from ..model_identity import Model
from ..processes import started_processes
from .document import WmdpEvaluation, WmdpLeaf, WmdpScore

TASKS = ("wmdp_bio", "wmdp_cyber", "mmlu")
SUBJECTS = 57
EXPECTED = '{"question": text, "choices": [4 texts], "answer": 0, 1, 2 or 3}'
HOW_TO_OBTAIN = "The questions are on the hub as cais/wmdp and cais/mmlu."
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
VERSIONS = ("rosu-llm", "lm-eval", "torch", "transformers", "datasets", "accelerate")


@dataclass(frozen=True)
class WmdpSettings:
    """How the questions are asked; ``limit`` is the number of questions per task (for MMLU, per subject)."""

    tasks: tuple[str, ...]
    limit: int | None = None
    dtype: str = "auto"
    device: str | None = None
    batch_size: str = "8"
    seed: int = 0
    trust_remote_code: bool = False


def answers(leaves: Mapping[str, WmdpLeaf], task: str) -> str:
    """A ``1`` or ``0`` per question of a task, subjects in alphabetical order."""
    return "".join(leaf["answers"] for _, leaf in sorted(leaves.items()) if leaf["of"] == task)


def require_lm_eval() -> None:
    """Raise if lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("Evaluation on WMDP and MMLU needs lm-eval: pip install 'rosu-llm[eval]'.")


#: Devices that lm-eval knows.
_KINDS = ("cpu", "cuda", "xpu", "npu", "mps")


def device_type(device: str | None) -> str:
    """The kind of device that will be used; raises for one that is not there, where lm-eval would take another."""
    import torch

    if device is None:
        kind = accelerator_kind() or "cpu"
        if kind not in _KINDS:
            raise ConfigError(f"lm-eval cannot use this machine's {kind} devices: pass --device cpu.")
        return kind
    kind, _, number = device.partition(":")
    if kind not in _KINDS or (number and not number.isdigit()):
        raise ConfigError(f"--device {device!r} is not one of {', '.join(_KINDS)}, or cuda:N, xpu:N, npu:N.")
    present = {"cpu": 1, "mps": int(torch.backends.mps.is_available())}.get(kind)
    if present is None:
        present = getattr(torch, kind).device_count() if hasattr(torch, kind) else 0
    if int(number or 0) >= present:
        raise ConfigError(f"--device {device} is not here: torch sees {present} {kind} device(s).")
    return kind


def evaluate(model: Model, settings: WmdpSettings, include: Path | None, *, builtin: bool) -> WmdpEvaluation | None:
    """Run the tasks; the result on the first process, None on the others.

    Task definitions come from the folder ``include``, and with ``builtin`` from lm-eval for names not defined there.
    """
    return _evaluate(lambda: _load(model, settings), settings, include, builtin)


def evaluate_loaded(
    model: Any, tokenizer: Any, settings: WmdpSettings, include: Path | None, *, builtin: bool
) -> WmdpEvaluation:
    """The same for a model in memory, on one process."""
    from lm_eval.models.huggingface import HFLM

    def wrap() -> Any:
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=settings.batch_size)
        lm._rank, lm._world_size = 0, 1
        return lm

    found = _evaluate(wrap, settings, include, builtin)
    assert found is not None  # the only process is the first
    return found


def _evaluate(
    load: Callable[[], Any], settings: WmdpSettings, include: Path | None, builtin: bool
) -> WmdpEvaluation | None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    logging.getLogger("lm_eval.evaluator").setLevel(logging.ERROR)  # it warns per subject about 0-shot
    manager = TaskManager(include_path=str(include) if include else None, include_defaults=builtin)
    lm = load()
    try:
        raw = simple_evaluate(
            model=lm,
            tasks=list(settings.tasks),
            num_fewshot=0,
            limit=settings.limit,
            log_samples=True,
            task_manager=manager,
            **dict.fromkeys(SEEDS, settings.seed),
        )
    except OSError as error:
        raise DataError(
            f"The tasks {', '.join(settings.tasks)} could not be loaded ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}). Without access to cais/wmdp and cais/mmlu on the hub, pass --data-dir."
        ) from error
    if raw is None:
        return None
    dtype = str(lm.model.dtype).removeprefix("torch.")
    used = {"dtype_used": dtype, "device_used": lm.device.type, "processes": lm.world_size}
    return _digest(raw, {**asdict(settings), "num_fewshot": 0, **used})


def _load(model: Model, settings: WmdpSettings) -> Any:
    from accelerate import PartialState
    from lm_eval.models.huggingface import HFLM

    gc.collect()  # a model evaluated before may still hold its memory
    kind = device_type(settings.device)
    numbered = f"{kind}:0" if kind in ("xpu", "npu") else kind  # lm-eval takes these with a number only
    lm = HFLM(
        pretrained=model.source,
        revision=model.revision,
        dtype=settings.dtype,
        device=settings.device if settings.device not in (None, kind) else numbered,
        batch_size=settings.batch_size,
        trust_remote_code=settings.trust_remote_code,
        use_safetensors=True,
    )
    state = PartialState()
    if state.num_processes != (started := started_processes()):
        raise ConfigError(
            f"{started} processes were started but accelerate sees {state.num_processes}: on CPUs pass --device cpu to "
            "--num-processes, or set ACCELERATE_USE_CPU=true."
        )
    if lm.device.type != kind:
        raise ConfigError(f"lm-eval took the {lm.device.type} in place of {kind}: pass --device {lm.device.type}.")
    # lm-eval shares the questions only where it sees several GPUs on this machine, and numbers processes per machine;
    # elsewhere every process would silently answer everything.
    lm._rank, lm._world_size = state.process_index, state.num_processes
    return lm


def _digest(raw: Mapping[str, Any], settings: dict[str, Any]) -> WmdpEvaluation:
    tasks = settings["tasks"]
    leaves: dict[str, WmdpLeaf] = {}
    for name, samples in sorted(raw["samples"].items()):
        ordered = sorted(samples, key=lambda sample: sample["doc_id"])
        text = "\n".join(repr((sample["arguments"], sample["target"])) for sample in ordered)
        leaves[name] = {
            "of": name if name in tasks else "mmlu",
            "version": raw["versions"].get(name),
            "hash": f"sha256:{hashlib.sha256(text.encode()).hexdigest()}",
            "dataset": raw["configs"][name].get("dataset_path"),
            "questions": len(ordered),
            "available": raw["n-samples"][name]["original"],
            "answers": "".join("1" if sample["acc"] else "0" for sample in ordered),
        }
    scores = {task: _score(task, raw["results"][task], leaves) for task in tasks}
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    versions = installed_versions(*VERSIONS)
    return {"scores": scores, "leaves": leaves, "settings": settings, "versions": versions, "date": date}


def _score(task: str, metrics: Mapping[str, Any], leaves: Mapping[str, WmdpLeaf]) -> WmdpScore:
    given = answers(leaves, task)
    accuracy = given.count("1") / len(given)
    if abs(metrics["acc,none"] - accuracy) > 1e-9:
        raise DataError(
            f"lm-eval reports {metrics['acc,none']:.6f} for {task}, its {len(given)} answers give {accuracy:.6f}: "
            "the task's definition must average over questions (weight_by_size: true)."
        )
    stderr = metrics.get("acc_stderr,none")
    known = stderr if isinstance(stderr, float) else None
    return {"accuracy": accuracy, "stderr": known, "questions": len(given)}


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
    _dump(folder / "mmlu.yaml", {**_builtin("mmlu", "default", "_mmlu.yaml"), "task": list(sizes)})
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
    if (include := definition.pop("include", None)) is None:
        return definition
    return {**yaml.safe_load((path.parent / include).read_text(encoding="utf-8")), **definition}


def _dump(path: Path, definition: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(dict(definition), sort_keys=False, allow_unicode=True), encoding="utf-8")
