"""The runs named on the command line: whatever their folders hold, and a sentence for everything that they do not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...evaluation.model_identity import of_other_weights
from ...evaluation.provenance import HydraRecord, read_hydra
from ...evaluation.tofu.collection import find_results, unique_labels
from ...evaluation.tofu.document import FILES
from ...evaluation.tofu.results import Result, check_current, read_result
from ...evaluation.wmdp.document import SCHEMA as WMDP
from ...training.checkpoints import last_complete
from ...training.model_card import read_card
from ..demo import REFERENCES, label_of

DIAGNOSIS, SWEEP = "rosu/diagnosis/1", "rosu/sweep/1"
ORTHOGONALITY, SAFEGUARDS = "rosu/audit-orthogonality/1", "rosu/audit-safeguards/1"
SENSITIVITY = "rosu/audit-sensitivity/1"
RELEARN, QUANTIZE = "rosu/audit-relearn/1", "rosu/audit-quantize/1"
EXTRACT = "rosu/audit-extract/1"
REQUESTS, MUSE = "rosu/requests/1", "rosu/muse/1"

#: What other verbs leave in a run's folder, by schema.
REPORTS = {
    DIAGNOSIS: "diagnosis.json",
    ORTHOGONALITY: "audit_orthogonality.json",
    SAFEGUARDS: "audit_safeguards.json",
    SENSITIVITY: "audit_sensitivity.json",
    SWEEP: "trials.json",
    RELEARN: "audit_relearn.json",
    QUANTIZE: "audit_quantize.json",
    EXTRACT: "audit_extract.json",
    REQUESTS: "requests.json",
    MUSE: "muse.json",
}
#: Of an unlearned model: never in its own folder, so that their folder is given beside it.
OF_MODELS = (RELEARN, QUANTIZE, EXTRACT)
DEMO = "results.json"
_MADE_BY_RUNS = ("rosu_run.json", "trainer_state.json", "README.md", "config.json", "adapter_config.json", ".hydra")
_PRETRAINED = "model.model_args.pretrained_model_name_or_path"


@dataclass(frozen=True)
class ReportedRun:
    """A run.

    Attributes:
        kind: what made it.
        settings: flat; empty when nothing recorded them.
        facts: other things recorded about it (layout, seconds, …).
        log: the trainer's log, one mapping per entry, in order.
        base: the model it started from, by folder or name.
        tofu: its TOFU evaluation.
        wmdp: its WMDP evaluation's file.
        demo: the document of the ``rosu demo`` that it is part of.
        reports: content of files of other verbs by their schema.
        problems: what is missing or unreadable, one sentence each.
    """

    label: str
    folder: Path
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    log: Sequence[Mapping[str, Any]] = ()
    base: str | None = None
    tofu: Result | None = None
    wmdp: Path | None = None
    demo: Mapping[str, Any] | None = None
    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    problems: Sequence[str] = ()

    @property
    def method(self) -> str | None:
        """The method, as recorded, with its forget loss unless that is the usual one: NPO is a loss, not a rule."""
        if "method" not in self.settings:
            return None
        loss = self.settings.get("forget_loss") or "nll"
        return str(self.settings["method"]) + (f", {loss}" if loss != "nll" else "")


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Every run at ``paths``, in order, told apart by label; each folder once."""
    folders = list(dict.fromkeys(path.absolute() for path in paths))
    demos = {folder for folder in folders if all((folder / name).is_file() for name in (DEMO, "answers.md"))}
    for folder in folders:
        if not folder.is_dir():
            raise DataError(
                f"{folder} is not a folder. Give output folders of rosu train, rosu demo or OpenUnlearning."
            )
        found = folder in demos or any((folder / name).exists() for name in (*_MADE_BY_RUNS, *REPORTS.values()))
        if not found and not any(folder.glob("evals*")) and not any(folder.glob("checkpoint-*")):
            raise DataError(
                f"{folder} holds nothing of a run (no rosu_run.json, trainer_state.json, evals, …). Give the run's "
                "folder."
            )
    plain = [folder for folder in folders if folder not in demos]
    names = dict(zip(plain, unique_labels(Result(folder / "evals" / FILES[0]) for folder in plain), strict=True))
    read = [[_read_run(folder, names[folder])] if folder in names else _read_demo(folder) for folder in folders]
    runs = [run for found in read for run in found]
    labels = [run.label for run in runs]
    return [
        run if labels.count(run.label) == 1 else replace(run, label=f"{run.folder.name}: {run.label}") for run in runs
    ]


def _read_run(folder: Path, label: str) -> ReportedRun:
    """The run of ``rosu train`` or OpenUnlearning in ``folder``, or the sweep itself in place of one of its trials."""
    problems: list[str] = []
    settings: Mapping[str, Any]
    versions: Mapping[str, str] = {}
    if (folder / REPORTS[SWEEP]).is_file():
        reports = _reports(folder, problems)
        content = reports.get(SWEEP, {})
        settings, versions = content.get("recipe") or {}, content.get("versions") or {}
        return ReportedRun(label, folder, "rosu sweep", settings, versions, reports=reports, problems=problems)
    if not any((folder / name).exists() for name in _MADE_BY_RUNS):
        reports = _reports(folder, problems)
        if any(schema in reports for schema in OF_MODELS):
            return ReportedRun(label, folder, "rosu audit", reports=reports, problems=problems)
        if REQUESTS in reports:
            return ReportedRun(label, folder, "rosu train --requests", reports=reports, problems=problems)
        problems.clear()
    try:
        job = read_hydra(folder)
    except DataError as error:
        problems.append(str(error))
        job = HydraRecord()
    record = _read_object(folder / "rosu_run.json", problems)
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
    log, tofu = _log(folder, problems), _tofu(folder, problems)
    small = [f for f in (*folder.glob("*.json"), *folder.glob("evals*/*.json")) if f.stat().st_size < 1 << 24]
    wmdp = _wmdp(folder, sorted(small), problems)
    run = ReportedRun(label, folder, kind, settings, versions, facts, log, str(base) if base else None, tofu, wmdp)
    return replace(run, reports=_reports(folder, problems), problems=problems)


def _read_demo(folder: Path) -> list[ReportedRun]:
    """The folder of ``rosu demo``: one run per method, all with the demo's own table and answers."""
    problems: list[str] = []
    content = _read_object(folder / DEMO, problems)
    rows = [row for row in content.get("rows") or [] if isinstance(row, Mapping) and "method" in row]
    if not rows:
        why = " ".join(problems) or "results.json holds no rows."
        raise DataError(f"{folder} is no usable demo: {why} Run it again.")
    logs, settings, versions = (content.get(key) or {} for key in ("logs", "settings", "versions"))
    common, own = (settings.get(key) or {} for key in ("common", "methods"))
    demo = {**content, "rows": rows}
    runs = []
    for row in rows:
        name = str(row["method"])
        if name not in REFERENCES:
            merged, facts = {**common, **(own.get(name) or {})}, {"seconds": row["seconds"]} if "seconds" in row else {}
            lacking = [] if logs.get(name) else ["There is no log of it."]
            run = ReportedRun(label_of(name), folder, "rosu demo", merged, versions, facts, logs.get(name) or [])
            runs.append(replace(run, demo=demo, problems=lacking))
    return runs


def _read_object(path: Path, problems: list[str]) -> dict[str, Any]:
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


def _hydra_settings(job: HydraRecord) -> dict[str, Any]:
    """The part of OpenUnlearning's configuration that says what was done, flat."""
    named = {
        "method": job.choice("trainer") or job.get("trainer.handler"),
        "model": job.choice("model"),
        "model_name_or_path": job.get(_PRETRAINED),
        "forget_split": job.get("forget_split"),
        "retain_split": job.get("retain_split"),
    }
    settings = {name: value for name, value in named.items() if value is not None}
    for group in ("trainer.method_args", "trainer.args"):
        values = job.get(group)
        for key in values if isinstance(values, Mapping) else ():
            settings.setdefault(str(key), job.get(f"{group}.{key}"))
    return settings


def _log(folder: Path, problems: list[str]) -> list[Mapping[str, Any]]:
    """The log of the finished run, else of its newest whole checkpoint."""
    checkpoint = last_complete(folder)
    for place in (folder, *([checkpoint] if checkpoint else [])):
        history = _read_object(place / "trainer_state.json", problems).get("log_history")
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
        results = [read_result(file) for file in find_results(folder) if Result(file).run == folder.absolute()]
        for result in results:
            check_current(result)
            _ = result.split, result.model  # reads the records beside it, which may be damaged, too
    except DataError as error:
        problems.append(str(error))
        return None
    if len(results) > 1:
        others = ", ".join(str(result.path.relative_to(folder)) for result in results[1:])
        problems.append(f"It has several TOFU results; left out: {others}.")
    return results[0] if results else None


def _wmdp(folder: Path, files: Sequence[Path], problems: list[str]) -> Path | None:
    """The first WMDP result of the weights that the folder holds now."""
    for file in files:
        content = _read_object(file, [])
        if content.get("schema") == WMDP:
            why = of_other_weights((content.get("model") or {}).get("weights"), folder)
            if why is None:
                return file
            problems.append(f"{file.name} is left out: {why}.")
    return None


def _reports(folder: Path, problems: list[str]) -> dict[str, Mapping[str, Any]]:
    """The files of other verbs; a trial of a sweep has its sweep's table a few folders up."""
    found: dict[str, Mapping[str, Any]] = {}
    for schema, name in REPORTS.items():
        places = [folder, *list(folder.parents)[:3]] if schema == SWEEP else [folder]
        places += sorted(folder.glob("evals_muse*")) if schema == MUSE else []
        path = next((place / name for place in places if (place / name).is_file()), folder / name)
        content = _read_object(path, problems)
        if content.get("schema") == schema:
            found[schema] = content
        elif content and path.parent == folder:
            problems.append(f"{name} has schema {content.get('schema')!r}, not {schema!r}; it is left out.")
    return found
