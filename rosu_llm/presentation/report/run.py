"""One run as a report sees it: whatever its folder holds, and a sentence for everything that it does not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...evaluation.collection import find_results
from ...evaluation.provenance import Job, read_job
from ...evaluation.results import FILES, Result, read_result
from ...training.checkpoints import last_complete
from ...training.model_card import read_card

LogEntry = Mapping[str, Any]

DIAGNOSIS, SWEEP = "rosu/diagnosis/1", "rosu/sweep/1"
ORTHOGONALITY, SAFEGUARDS = "rosu/audit-orthogonality/1", "rosu/audit-safeguards/1"
SENSITIVITY = "rosu/audit-sensitivity/1"

#: What other verbs leave in a run's folder, by schema.
REPORTS = {
    DIAGNOSIS: "diagnosis.json",
    ORTHOGONALITY: "audit_orthogonality.json",
    SAFEGUARDS: "audit_safeguards.json",
    SENSITIVITY: "audit_sensitivity.json",
    SWEEP: "trials.json",
}


@dataclass(frozen=True)
class Demo:
    """What ``rosu demo`` measured: rows of figures, one per model, and its ``answers.md``."""

    rows: Sequence[Mapping[str, Any]]
    answers: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run.

    Attributes:
        kind: what made it.
        settings: flat; empty when nothing recorded them.
        facts: other things recorded about it (layout, seconds, …).
        log: the trainer's log, one mapping per entry, in order.
        base: the model it started from, by folder or name.
        tofu: its TOFU evaluation.
        wmdp: its WMDP evaluation's file.
        reports: content of files of other verbs by their schema.
        problems: what is missing or unreadable, one sentence each.
    """

    label: str
    folder: Path
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    log: Sequence[LogEntry] = ()
    base: str | None = None
    tofu: Result | None = None
    wmdp: Path | None = None
    demo: Demo | None = None
    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    problems: Sequence[str] = ()

    @property
    def method(self) -> str | None:
        """The method, as recorded, with its forget loss unless that is the usual one: NPO is a loss, not a rule."""
        if "method" not in self.settings:
            return None
        loss = self.settings.get("forget_loss") or "nll"
        return str(self.settings["method"]) + (f", {loss}" if loss != "nll" else "")


def read_run(folder: Path, label: str) -> Run:
    """The run of ``rosu train`` or OpenUnlearning in ``folder``."""
    problems: list[str] = []
    job = _try(lambda: read_job(folder), problems) or Job()
    record = read_object(folder / "rosu_run.json", problems)
    settings: Mapping[str, Any]
    versions: Mapping[str, str] = {}
    if job.config:
        kind, settings, base, facts = "OpenUnlearning", _hydra_settings(job), job.get(_PRETRAINED), record
    else:
        kind = "rosu train"
        card = read_card(folder / "README.md")
        settings, versions = record.get("settings") or card.settings, record.get("versions") or card.versions
        base = settings.get("model_name_or_path") or card.base_model
        facts = {key: record[key] for key in ("date", "seconds", "steps", "processes", "layout") if key in record}
    if not settings:
        problems.append("No settings are recorded (no rosu_run.json, model card or .hydra/config.yaml).")
    return Run(
        label=label,
        folder=folder,
        kind=kind,
        settings=settings,
        versions=versions,
        facts=facts,
        log=_log(folder, problems),
        base=str(base) if base else None,
        tofu=_tofu(folder, problems),
        wmdp=_wmdp(folder),
        reports=_reports(folder, problems),
        problems=problems,
    )


def read_sweep(folder: Path, label: str) -> Run:
    """The folder of ``rosu sweep`` itself, in place of one of its trials."""
    problems: list[str] = []
    reports = _reports(folder, problems)
    content = reports.get(SWEEP, {})
    settings, versions = content.get("recipe") or {}, content.get("versions") or {}
    return Run(
        label=label,
        folder=folder,
        kind="rosu sweep",
        settings=settings,
        versions=versions,
        reports=reports,
        problems=problems,
    )


def read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """A JSON object; {} where there is none, with a problem noted when the file is there but cannot be used."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} is not whole JSON ({error}); it is left out.")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{path.name} holds a {type(content).__name__}, not an object; it is left out.")
        return {}
    return content


_PRETRAINED = "model.model_args.pretrained_model_name_or_path"
_HYDRA = ("trainer.method_args", "trainer.args")


def _hydra_settings(job: Job) -> dict[str, Any]:
    """The part of OpenUnlearning's configuration that says what was done, flat."""
    settings: dict[str, Any] = {}
    for name, value in (
        ("method", job.choice("trainer") or job.get("trainer.handler")),
        ("model", job.choice("model")),
        ("model_name_or_path", job.get(_PRETRAINED)),
        ("forget_split", job.get("forget_split")),
        ("retain_split", job.get("retain_split")),
    ):
        if value is not None:
            settings[name] = value
    for group in _HYDRA:
        values = job.get(group)
        for key in values if isinstance(values, Mapping) else ():
            settings.setdefault(str(key), job.get(f"{group}.{key}"))
    return settings


def _log(folder: Path, problems: list[str]) -> list[LogEntry]:
    """The log of the finished run, else of its newest whole checkpoint."""
    checkpoint = last_complete(folder)
    for place in (folder, *([checkpoint] if checkpoint else [])):
        history = read_object(place / "trainer_state.json", problems).get("log_history")
        entries = [e for e in history if isinstance(e, Mapping) and "step" in e] if isinstance(history, list) else []
        if entries:
            if place != folder:
                problems.append(f"The log is that of {place.name}, not of a finished run.")
            return entries
    problems.append("There is no log (no trainer_state.json with log_history), so it has no curves.")
    return []


def _tofu(folder: Path, problems: list[str]) -> Result | None:
    """The TOFU result of this very run; folders of other runs below it are not its."""
    if not any(path for name in FILES for path in folder.rglob(name)):
        return None
    try:
        results = [read_result(file) for file in find_results(folder) if _belongs(file, folder)]
        for result in results:
            _ = result.split, result.model  # reads the records beside it, which may be damaged, too
    except DataError as error:
        problems.append(str(error))
        return None
    if len(results) > 1:
        others = ", ".join(str(result.path.relative_to(folder)) for result in results[1:])
        problems.append(f"It has several TOFU results; left out: {others}.")
    return results[0] if results else None


def _belongs(file: Path, folder: Path) -> bool:
    return Result(file, {}, {}, None, False).run == folder.absolute()


def _wmdp(folder: Path) -> Path | None:
    """A result of ``rosu eval wmdp`` in the run's folder."""
    from ...evaluation.wmdp.run import SCHEMA

    for path in sorted([*folder.glob("*.json"), *folder.glob("evals*/*.json")]):
        if path.stat().st_size < 1 << 24 and read_object(path, []).get("schema") == SCHEMA:
            return path
    return None


def _reports(folder: Path, problems: list[str]) -> dict[str, Mapping[str, Any]]:
    """The files of other verbs; a trial of a sweep has its sweep's table a few folders up."""
    found: dict[str, Mapping[str, Any]] = {}
    for schema, name in REPORTS.items():
        places = [folder, *list(folder.parents)[:3]] if schema == SWEEP else [folder]
        path = next((place / name for place in places if (place / name).is_file()), folder / name)
        content = read_object(path, problems)
        if content.get("schema") == schema:
            found[schema] = content
        elif content and path.parent == folder:
            problems.append(f"{name} has schema {content.get('schema')!r}, not {schema!r}; it is left out.")
    return found


def _try(read: Any, problems: list[str]) -> Any:
    try:
        return read()
    except DataError as error:
        problems.append(str(error))
        return None
