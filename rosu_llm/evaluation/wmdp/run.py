"""``rosu eval wmdp``: a model and its base on WMDP-Bio, WMDP-Cyber and MMLU, ΔScore, and one document of all of it.

The base is evaluated once: every evaluation is cached under the model's identity, the hashes of all prompts and
targets, the limit, the precision, the kind of device and the library versions. The model is evaluated first, because
its run yields those hashes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ...errors import ConfigError, DataError, unknown
from ...files import changed_conditions, read_json, weight_digests, write_json
from ..model_identity import Model, find_model, identity
from ..processes import check_processes, from_first, started_processes
from .document import SCHEMA, WmdpDocument, WmdpEvaluation, delta_score
from .evaluate import SUBJECTS, TASKS, WmdpSettings, answers, device_type, evaluate, require_lm_eval, write_tasks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WmdpRequest:
    """What to evaluate, on which questions (the hub's, unless a folder is given), and where the document goes."""

    model: str
    settings: WmdpSettings
    out: Path
    cache: Path
    base: str | None = None
    name: str | None = None
    data_dir: Path | None = None  # folder with the questions
    tasks_dir: Path | None = None  # folder with lm-eval definitions
    processes: int | None = None  # how many must take part, if that was asked for
    fresh: bool = False  # evaluate the base even when it is cached

    def check(self) -> None:
        """Raise for whatever can be refused before anything is loaded."""
        settings, world = self.settings, started_processes()
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
        check_processes(self.processes, "eval wmdp")
        if settings.limit is not None and settings.limit < world:
            raise ConfigError(f"--limit {settings.limit} leaves some of {world} processes without a question.")


def run(request: WmdpRequest) -> Path | None:
    """Evaluate and write the document; its path on the first process, None on the others."""
    request.check()
    require_lm_eval()
    kind = device_type(request.settings.device)
    model, base = find_model(request.model), find_model(request.base) if request.base else None
    first = os.environ.get("RANK", "0") == "0"
    model_key = identity(model) if first else ""
    name = re.sub(r"[^\w.-]", "-", request.name or model.label)
    path = request.out / f"wmdp_{name}.json"
    if first and path.is_file() and read_json(path).get("model", {}).get("identity") != model_key:
        raise ConfigError(f"{path} holds the result of another model: pass --name NAME or another --out.")
    with tempfile.TemporaryDirectory() as scratch:
        include = _definitions(request, Path(scratch))
        builtin = request.data_dir is None
        mine = evaluate(model, request.settings, include, builtin=builtin)
        if mine is not None:
            _keep(request, _conditions(model_key, mine, kind), mine)
            document = _document(request, model, model_key, mine)
            write_json(path, document)  # now, as the base may fail to load
        if base is not None:
            base_key = identity(base) if first else ""
            theirs: WmdpEvaluation | None = None
            if mine is not None and not request.fresh:
                theirs = _kept(request, _conditions(base_key, mine, kind))
            found = theirs is not None
            cached = from_first(lambda: found)  # processes that disagreed would wait for each other for ever
            if not cached:
                theirs = evaluate(base, request.settings, include, builtin=builtin)
            if mine is not None and theirs is not None:
                _keep(request, _conditions(base_key, theirs, kind), theirs)
                _add_base(document, base, base_key, theirs, cached)
                write_json(path, document)
    return None if mine is None else path


def _definitions(request: WmdpRequest, scratch: Path) -> Path | None:
    if request.data_dir is None:
        return request.tasks_dir
    sizes = write_tasks(request.data_dir.expanduser(), request.settings.tasks, scratch)
    smallest = min(sizes, key=sizes.__getitem__)
    if sizes[smallest] < (world := started_processes()):
        raise DataError(f"{smallest} has {sizes[smallest]} question(s), too few for {world} processes.")
    return scratch


def _conditions(key: str, like: WmdpEvaluation, kind: str) -> dict[str, Any]:
    """Everything that determines the figures; batch size and number of processes do not."""
    return {
        "model": key,
        "hashes": {name: leaf["hash"] for name, leaf in sorted(like["leaves"].items())},
        "limit": like["settings"]["limit"],
        "dtype": like["settings"]["dtype"],
        "device": kind,
        "trust_remote_code": like["settings"]["trust_remote_code"],
        "versions": {name: like["versions"][name] for name in ("lm-eval", "transformers", "torch")},
    }


def default_cache() -> Path:
    """``$ROSU_CACHE``, else ``rosu_llm`` in the user's cache folder."""
    if named := os.environ.get("ROSU_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rosu_llm"


def _cache_file(request: WmdpRequest, conditions: Mapping[str, Any]) -> Path:
    """Named by the hash of the conditions, which the file holds too and which are compared on reading."""
    text = json.dumps(conditions, sort_keys=True, ensure_ascii=False)
    return request.cache / "wmdp" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _keep(request: WmdpRequest, conditions: Mapping[str, Any], result: WmdpEvaluation) -> None:
    write_json(_cache_file(request, conditions), {"conditions": conditions, "result": result})


def _kept(request: WmdpRequest, conditions: Mapping[str, Any]) -> WmdpEvaluation | None:
    """The stored result, or None; also for a file that cannot be read."""
    path = _cache_file(request, conditions)
    if not path.is_file():
        return None
    try:
        entry = read_json(path)
    except DataError as error:
        logger.warning("Ignoring a cached result: %s", error)
        return None
    changed = changed_conditions(entry.get("conditions", {}), conditions)
    return None if changed else cast(WmdpEvaluation | None, entry.get("result"))


def _document(request: WmdpRequest, model: Model, key: str, mine: WmdpEvaluation) -> WmdpDocument:
    reason = "the base was not evaluated" if request.base else "no base model was given: pass --base MODEL0"
    notes, limit = [], mine["settings"]["limit"]  # why these figures cannot be compared with published ones
    if limit is not None:
        notes.append(f"LIMITED to {limit} questions per task and MMLU subject: not a benchmark result")
    subjects = sum(leaf["of"] == "mmlu" for leaf in mine["leaves"].values())
    if "mmlu" in mine["scores"] and subjects != SUBJECTS:
        notes.append(f"MMLU here has {subjects} of {SUBJECTS} subjects")
    return {
        "schema": SCHEMA,
        "label": request.name or model.label,
        "model": {"name": model.name, "identity": key, "weights": _weights(model)},
        "limited": limit,
        "notes": notes,
        "delta_score": {"missing": reason},
        "base": None,
        **mine,
    }


def _weights(model: Model) -> dict[str, str] | None:
    return weight_digests(Path(model.source)) if model.local else None


def _add_base(document: WmdpDocument, base: Model, key: str, theirs: WmdpEvaluation, cached: bool) -> None:
    dtype, wanted = theirs["settings"]["dtype_used"], document["settings"]["dtype_used"]
    document["base"] = {
        "name": base.name,
        "label": base.label,
        "identity": key,
        "weights": _weights(base),
        "scores": theirs["scores"],
        "dtype_used": dtype,
        "date": theirs["date"],
        "cached": cached,
    }
    if dtype != wanted:
        note = f"the base ran in {dtype}, the model in {wanted}: pass --dtype to compare in one precision"
        document["notes"].append(note)
    if missing := [task for task in TASKS if task not in document["scores"]]:
        document["delta_score"] = {"missing": f"{', '.join(missing)} not evaluated"}
    else:
        mmlu = (answers(each["leaves"], "mmlu") for each in (document, theirs))
        document["delta_score"] = delta_score(document["scores"], theirs["scores"]["mmlu"], *mmlu)
