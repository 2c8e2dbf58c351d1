"""``rosu eval wmdp``: a model and its base on WMDP-Bio, WMDP-Cyber and MMLU, ΔScore, and one record of all of it.

The base is evaluated once: every evaluation is cached under the model's identity, the hashes of all prompts and
targets, the limit, the precision, the kind of device and the versions that compute it. The model goes first, because
its run yields those hashes.
"""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, DataError, unknown
from ...files import read_json, write_json
from ..cache import ResultCache
from ..model_identity import Model, find_model, identity
from .data import SUBJECTS, TASKS, write_tasks
from .delta_score import delta_score
from .lm_eval_run import Evaluation, Settings, device_type, evaluate, require_lm_eval

SCHEMA = "rosu-llm/wmdp/1"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What to evaluate, on which questions, and where the record goes.

    Attributes:
        data_dir: folder with the questions; tasks_dir: folder with lm-eval definitions; with neither, the hub.
        processes: how many processes must take part, where that was asked for.
        fresh: evaluate the base even when it is cached.
    """

    model: str
    settings: Settings
    out: Path
    cache: Path
    base: str | None = None
    name: str | None = None
    data_dir: Path | None = None
    tasks_dir: Path | None = None
    processes: int | None = None
    fresh: bool = False

    def check(self) -> None:
        """What can be known to be wrong before anything is loaded."""
        settings, world = self.settings, int(os.environ.get("WORLD_SIZE", "1"))
        for task in settings.tasks:
            if task not in TASKS:
                raise unknown("task", task, TASKS)
        if settings.limit is not None and settings.limit < 1:
            raise ConfigError(f"--limit {settings.limit} must be at least 1 question per task.")
        if settings.batch_size != "auto" and not (settings.batch_size.isdigit() and int(settings.batch_size)):
            raise ConfigError(f"--batch-size {settings.batch_size!r} must be a number of at least 1, or 'auto'.")
        if self.data_dir and self.tasks_dir:
            raise ConfigError("--data-dir and --tasks-dir both say where the questions come from: give one of them.")
        if self.tasks_dir and not [*self.tasks_dir.glob("**/*.yaml")]:
            raise ConfigError(f"--tasks-dir {str(self.tasks_dir)!r} holds no lm-eval task (*.yaml).")
        if self.processes is not None and self.processes != world:
            raise ConfigError(
                f"--num-processes {self.processes} was asked for, but {world} started. Launch with "
                f"'torchrun --nproc_per_node {self.processes} -m rosu_llm eval wmdp …' instead."
            )
        if settings.limit is not None and settings.limit < world:
            raise ConfigError(f"--limit {settings.limit} leaves some of {world} processes without a question.")


def run(request: Request) -> Path | None:
    """Evaluate and write the record; its path on the first process, None on the others."""
    request.check()
    require_lm_eval()
    kind = device_type(request.settings.device)
    model, base = find_model(request.model), find_model(request.base) if request.base else None
    first = os.environ.get("RANK", "0") == "0"
    model_key = identity(model) if first else ""
    record_path = request.out / f"wmdp_{_file_name(request.name or model.label)}.json"
    if first:
        _refuse_other_model(record_path, model_key)
    with tempfile.TemporaryDirectory() as scratch:
        include = _definitions(request, Path(scratch))
        builtin = request.data_dir is None
        mine = evaluate(model, request.settings, include, builtin=builtin)
        cache = ResultCache(request.cache / "wmdp")
        if mine is not None:
            cache.put(_conditions(model_key, mine, kind), mine.as_json())
            record = _record(request, model, model_key, mine)
            write_json(record_path, record)  # now, lest a base that does not load take it along
        if base is not None:
            base_key = identity(base) if first else ""
            theirs = _cached(cache, base_key, mine, kind) if mine is not None and not request.fresh else None
            cached = _from_first_process(theirs is not None)
            if not cached:
                theirs = evaluate(base, request.settings, include, builtin=builtin)
            if mine is not None and theirs is not None:
                cache.put(_conditions(base_key, theirs, kind), theirs.as_json())
                _add_base(record, base, base_key, mine, theirs, cached)
                write_json(record_path, record)
    return None if mine is None else record_path


def _definitions(request: Request, scratch: Path) -> Path | None:
    if request.data_dir is None:
        return request.tasks_dir
    sizes = write_tasks(request.data_dir.expanduser(), request.settings.tasks, scratch)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    smallest = min(sizes, key=lambda task: sizes[task])
    if sizes[smallest] < world:
        raise DataError(f"{smallest} has {sizes[smallest]} question(s), too few for {world} processes.")
    return scratch


def _conditions(key: str, like: Evaluation, kind: str) -> dict[str, Any]:
    """Everything that determines the numbers. The batch size and the number of processes do not."""
    return {
        "model": key,
        "hashes": like.hashes,
        "limit": like.settings["limit"],
        "dtype": like.settings["dtype"],
        "device": kind,
        "trust_remote_code": like.settings["trust_remote_code"],
        "versions": {name: like.versions[name] for name in ("lm-eval", "transformers", "torch")},
    }


def _cached(cache: ResultCache, key: str, like: Evaluation, kind: str) -> Evaluation | None:
    found = cache.get(_conditions(key, like, kind))
    return None if found is None else Evaluation.from_json(found)


def _from_first_process(value: bool) -> bool:
    """The same decision everywhere: processes that disagreed would wait for each other for ever."""
    from accelerate.utils import broadcast_object_list

    return bool(broadcast_object_list([value])[0])


def _file_name(label: str) -> str:
    return "".join(character if character.isalnum() or character in "-_." else "-" for character in label)


def _refuse_other_model(path: Path, key: str) -> None:
    if path.is_file() and read_json(path).get("model", {}).get("identity") != key:
        raise ConfigError(f"{path} holds the result of another model: pass --name NAME or another --out.")


def _record(request: Request, model: Model, key: str, mine: Evaluation) -> dict[str, Any]:
    reason = "the base was not evaluated" if request.base else "no base model was given: pass --base MODEL0"
    return {
        "schema": SCHEMA,
        "label": request.name or model.label,
        "model": {"name": model.name, "identity": key},
        "limited": mine.settings["limit"],
        "notes": _notes(mine),
        "delta_score": {"missing": reason},
        "base": None,
        **mine.as_json(),
    }


def _add_base(
    record: dict[str, Any], base: Model, key: str, mine: Evaluation, theirs: Evaluation, cached: bool
) -> None:
    record["base"] = {
        "name": base.name,
        "label": base.label,
        "identity": key,
        "scores": {task: asdict(score) for task, score in theirs.scores.items()},
        "dtype_used": theirs.settings["dtype_used"],
        "date": theirs.date,
        "cached": cached,
    }
    if theirs.settings["dtype_used"] != mine.settings["dtype_used"]:
        note = f"the base ran in {theirs.settings['dtype_used']}, the model in {mine.settings['dtype_used']}"
        record["notes"].append(f"{note}: pass --dtype to compare in one precision")
    missing = [task for task in TASKS if task not in mine.scores]
    if missing:
        record["delta_score"] = {"missing": f"{', '.join(missing)} not evaluated"}
        return
    delta = delta_score(mine.scores, theirs.scores["mmlu"], mine.answers("mmlu"), theirs.answers("mmlu"))
    record["delta_score"] = asdict(delta)


def _notes(mine: Evaluation) -> list[str]:
    """What keeps these numbers from being the published benchmark's."""
    notes = []
    if mine.settings["limit"] is not None:
        notes.append(f"LIMITED to {mine.settings['limit']} questions per task and MMLU subject: not a benchmark result")
    subjects = sum(leaf["of"] == "mmlu" for leaf in mine.leaves.values())
    if "mmlu" in mine.scores and subjects != SUBJECTS:
        notes.append(f"MMLU here has {subjects} of {SUBJECTS} subjects")
    return notes
